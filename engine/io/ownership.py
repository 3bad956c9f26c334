"""The router that owns each request."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Generic, TypeVar

from engine.io.inbox import RequestKey
from shared import wire

Owner = TypeVar("Owner")

_FORGOTTEN_AFTER_HEARTBEATS = 4


class Ownership(Generic[Owner]):
    """The requests of several routers. Used on the IO thread only.

    The end of a request may be reported after its router has aborted it. Requests are therefore
    forgotten a few heartbeats after they were last live, not when they end.
    """

    def __init__(self) -> None:
        self._owners: dict[RequestKey, Owner] = {}
        self._heartbeats_missed: dict[RequestKey, int] = {}

    def __len__(self) -> int:
        return len(self._owners)

    def has_any_of(self, owner: Owner) -> bool:
        return any(one is owner for one in self._owners.values())

    def add(self, request: wire.Submit | wire.Encode, owner: Owner) -> None:
        key = (request.request_id, request.attempt)
        self._owners[key] = owner
        self._heartbeats_missed[key] = 0

    def is_of(self, abort: wire.Abort, owner: Owner) -> bool:
        """Return whether ``owner`` may end the request. Without an owner, any router may: no
        other one knows the request."""
        if abort.attempt is None:
            owners = [self._owners[key] for key in self._owners if key[0] == abort.request_id]
            return all(one is owner for one in owners)
        return self._owners.get((abort.request_id, abort.attempt), owner) is owner

    def live_of(self, owner: Owner, live: Iterable[wire.LiveRequest]) -> list[wire.LiveRequest]:
        return [one for one in live if self._owners.get((one.request_id, one.attempt)) is owner]

    def route(self, message: wire.Message) -> Iterator[tuple[Owner | None, wire.Message]]:
        """Yield parts of ``message`` with their owners; None means all routers."""
        if isinstance(message, wire.Tokens):
            parts: dict[int, tuple[Owner, list[wire.Delta]]] = {}
            for delta in message.deltas:
                owner = self._owners.get((delta.request_id, delta.attempt))
                if owner is not None:
                    parts.setdefault(id(owner), (owner, []))[1].append(delta)
            for owner, deltas in parts.values():
                whole = len(deltas) == len(message.deltas)
                yield owner, message if whole else wire.Tokens(deltas=deltas)
        elif isinstance(message, wire.Accepted | wire.Refused | wire.Encoded):
            owner = self._owners.get((message.request_id, message.attempt))
            if owner is not None:
                yield owner, message
        else:
            yield None, message

    def take_all_of(self, owner: Owner) -> frozenset[RequestKey]:
        """Forget the requests of ``owner``, and return them."""
        keys = frozenset(key for key, one in self._owners.items() if one is owner)
        self._forget(keys)
        return keys

    def on_heartbeat(self, live: Iterable[wire.LiveRequest]) -> None:
        """Forget the requests that have not been live for a while."""
        alive = {(one.request_id, one.attempt) for one in live}
        for key in list(self._owners):
            self._heartbeats_missed[key] = 0 if key in alive else self._heartbeats_missed[key] + 1
            if self._heartbeats_missed[key] > _FORGOTTEN_AFTER_HEARTBEATS:
                self._forget([key])

    def _forget(self, keys: Collection[RequestKey]) -> None:
        for key in keys:
            del self._owners[key], self._heartbeats_missed[key]
