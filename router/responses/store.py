"""The store of responses, in bounded memory, separate for each API key."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from dataclasses import dataclass, field

import msgspec
from msgspec import Raw, Struct

from router.errors import NotFound
from router.responses.schemas import InputItem

MAX_RESPONSES = 4096
_OVERHEAD_BYTES = 1024
"""Of Python objects, for each response."""


class _Output(Struct):
    output: list[Raw]


class _ItemId(Struct):
    id: str | None = None


@dataclass(eq=False)
class StoredResponse:
    """One turn of a conversation."""

    key: str
    """The API key of its request."""
    previous: StoredResponse | None
    """The turn before, which is kept as long as this one."""
    input_items: bytes
    """The items of its request, as a list in JSON; not those of ``previous``."""
    response: bytes
    """A `ResponseObject` in JSON."""
    ref_count: int = field(default=0, repr=False)
    """The number of its holders: its entry in the store, and turns after it."""

    @property
    def size_bytes(self) -> int:
        return len(self.input_items) + len(self.response) + _OVERHEAD_BYTES

    @property
    def new_input(self) -> list[Raw]:
        return msgspec.json.decode(self.input_items, type=list[Raw])

    @property
    def output(self) -> list[Raw]:
        return msgspec.json.decode(self.response, type=_Output).output

    def full_input(self) -> list[Raw]:
        """Return the conversation up to its answer."""
        turns = [self.new_input]
        earlier = self.previous
        while earlier is not None:
            turns.append(earlier.new_input + earlier.output)
            earlier = earlier.previous
        return list(itertools.chain.from_iterable(reversed(turns)))

    def conversation(self) -> list[InputItem]:
        """Return the conversation with its answer."""
        items = self.full_input() + self.output
        return [msgspec.json.decode(item, type=InputItem) for item in items]

    def item_ids(self) -> list[str]:
        ids = (msgspec.json.decode(item, type=_ItemId).id for item in self._new_items())
        return [item_id for item_id in ids if item_id is not None]

    def item(self, item_id: str) -> InputItem:
        """Return an item of this turn. Raises `KeyError`."""
        for raw in self._new_items():
            item = msgspec.json.decode(raw, type=InputItem)
            if item.id == item_id:
                return item
        raise KeyError(item_id)

    def _new_items(self) -> list[Raw]:
        return self.new_input + self.output


class ResponseStore:
    """Responses by API key and id. The least recently used are dropped when there are too many
    or too many bytes. A response that later ones build on stays, and counts, until they are
    dropped."""

    def __init__(self, max_bytes: int, max_responses: int = MAX_RESPONSES) -> None:
        self._max_bytes = max_bytes
        self._max_responses = max_responses
        self._entries: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()
        """By API key and response id, the least recently used first."""
        self._items: dict[tuple[str, str], StoredResponse] = {}
        """The turn that has an item, by API key and item id."""
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, response_id: str, stored: StoredResponse) -> None:
        self._entries[stored.key, response_id] = stored
        self._retain(stored)
        while self.size_bytes > self._max_bytes or len(self._entries) > self._max_responses:
            _, oldest = self._entries.popitem(last=False)
            self._release(oldest)

    def find(self, key: str, response_id: str, param: str | None = None) -> StoredResponse:
        """Return a response. Raises `NotFound`, which names ``param``."""
        stored = self._entries.get((key, response_id))
        if stored is None:
            raise NotFound(
                f"There is no response '{response_id}'. It was not stored or was deleted, belongs"
                " to another key, or made room for newer ones: responses are kept in memory, and"
                " not for ever.",
                param=param,
                code="response_not_found",
            )
        self._entries.move_to_end((key, response_id))
        return stored

    def item(self, key: str, item_id: str) -> InputItem | None:
        stored = self._items.get((key, item_id))
        return None if stored is None else stored.item(item_id)

    def delete(self, key: str, response_id: str) -> None:
        """Delete a response. Raises `NotFound`."""
        self._release(self.find(key, response_id))
        del self._entries[key, response_id]

    def _retain(self, stored: StoredResponse | None) -> None:
        while stored is not None:
            stored.ref_count += 1
            if stored.ref_count > 1:
                return
            self.size_bytes += stored.size_bytes
            self._items.update(((stored.key, item_id), stored) for item_id in stored.item_ids())
            stored = stored.previous

    def _release(self, stored: StoredResponse | None) -> None:
        while stored is not None:
            stored.ref_count -= 1
            if stored.ref_count:
                return
            self.size_bytes -= stored.size_bytes
            for item_id in stored.item_ids():
                if self._items.get((stored.key, item_id)) is stored:
                    del self._items[stored.key, item_id]
            stored = stored.previous
