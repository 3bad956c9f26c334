"""Finds places for the adapters of requests, and those that wait for one."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Generic, NamedTuple, Protocol, TypeVar

from engine.adapters.checkpoint import AdapterError, AdapterWeights, Shape, read
from engine.adapters.places import MAX_AHEAD, AdapterPlaces
from shared import wire

logger = logging.getLogger(__name__)

MAX_CHECKS = 16
SWAP_SHARE = 0.2
"""Max share of the time in which adapters are read and put in their places while other requests
run: a client that alternates adapters must not slow others down."""


class AdapterRead(NamedTuple):
    """The outcome of reading a directory."""

    path: str
    outcome: AdapterWeights | AdapterError
    check: wire.CheckAdapter | None = None  # from a router, None for a request
    seconds: float = 0.0  # of the processor, for reading it


class AdapterReader:
    """Reads adapters on its own thread, one at a time."""

    def __init__(
        self, shapes: Mapping[str, Shape], max_rank: int, done: Callable[[AdapterRead], None]
    ) -> None:
        """``done`` is called on that thread."""
        self._shapes, self._max_rank, self._done = shapes, max_rank, done
        self._thread = ThreadPoolExecutor(1, "adapters")

    def start(self, path: str, check: wire.CheckAdapter | None = None) -> None:
        self._thread.submit(self._read, path, check)

    def _read(self, path: str, check: wire.CheckAdapter | None) -> None:
        outcome: AdapterWeights | AdapterError
        began = time.thread_time()  # time spent waiting for the disk slows nobody down
        try:
            outcome = read(Path(path), self._shapes, self._max_rank)
        except AdapterError as error:
            outcome = error
        except Exception as error:  # such as too little memory: only this adapter fails
            outcome = AdapterError(f"the adapter in {path} cannot be read: {error!r}")
        self._done(AdapterRead(path, outcome, check, time.thread_time() - began))

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


class Waiter(Protocol):
    """What waits for an adapter: a sequence."""

    @property
    def request(self) -> wire.Submit: ...

    @property
    def is_finished(self) -> bool: ...


W = TypeVar("W", bound=Waiter)


class AdapterQueue(Generic[W]):
    """Those whose adapters have no place yet.

    Requests without an adapter, or with a loaded one, pass at once. If no place is free, an
    adapter replaces the least recently used one as soon as no request uses it; new requests for
    the replaced adapter wait behind. Requests of batches wait behind all others, and give their
    places back to them. Only the main thread uses this."""

    def __init__(
        self,
        places: AdapterPlaces | None,
        reader: AdapterReader | None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """If ``places`` or ``reader`` is None, every request for an adapter is refused."""
        self._places, self._reader, self._clock = places, reader, clock
        self._waiting: list[W] = []
        self._reading: dict[str, str] = {}  # the expected digest, by path
        self._ready: dict[str, AdapterRead] = {}  # adapters waiting for a place, by digest
        self._closing: str | None = None
        """The adapter that will lose its place next."""
        self._next_swap_at = 0.0
        self._checks = 0
        self.wanted_place: int | None = None
        """The place that the last `take` needs back from requests of batches."""

    @property
    def is_waiting(self) -> bool:
        return bool(self._waiting)

    @property
    def num_loaded(self) -> int:
        return 0 if self._places is None else len(self._places.digests)

    @property
    def swaps(self) -> int:
        return 0 if self._places is None else self._places.swaps

    def find(self, waiter: W) -> int | wire.Refused | None:
        """Return the place of the adapter of a request, 0 without one, or its refusal; None if it
        waits for `take`."""
        request = waiter.request
        if request.adapter is None:
            return 0
        if self._places is None or self._reader is None:
            why = "this engine was started without --adapter and --max-adapters"
            return _refused(request, "unsupported", why)
        digest = request.adapter.digest
        if digest != self._closing and (place := self._places.find(digest)) is not None:
            return place
        self._waiting.append(waiter)
        self._read_ahead()
        return None

    def take(
        self, used: Collection[int], withdrawable: Set[int] = frozenset()
    ) -> Iterator[tuple[W, int | wire.Refused]]:
        """Yield those that no longer have to wait, with the places of their adapters. ``used`` are
        the places of running requests, of which those in ``withdrawable`` have requests of batches
        only. Afterwards `wanted_place` is one of these if a request needs it."""
        self._closing = self.wanted_place = None
        taken = {*used}
        left: list[W] = []
        self._waiting = [waiter for waiter in self._waiting if not waiter.is_finished]
        self._waiting.sort(key=lambda waiter: waiter.request.is_background)
        while self._waiting:
            waiter = self._waiting[0]
            try:
                place = self._place_for(waiter.request, taken, withdrawable)
            except AdapterError as error:
                del self._waiting[0]
                logger.warning("%s", error)
                yield waiter, _refused(waiter.request, "full", str(error))
                continue
            except Exception:  # the step in flight failed: the request waits on
                self._waiting = left + self._waiting
                raise
            del self._waiting[0]
            if place is None:
                left.append(waiter)
            else:
                taken.add(place)
                withdrawable = withdrawable - {place}
                yield waiter, place
        self._waiting = left
        first = [*dict.fromkeys(each.request.adapter_digest for each in left)][:MAX_AHEAD]
        self._ready = {digest: one for digest, one in self._ready.items() if digest in first}
        self._read_ahead()

    def on_read(self, done: AdapterRead) -> list[tuple[W, wire.Refused]]:
        """Accept an adapter that was read for requests. If it is unusable, return the refusals of
        those that waited for it."""
        outcome = done.outcome
        wanted = self._reading.pop(done.path)
        if isinstance(outcome, AdapterWeights) and outcome.digest == wanted:
            self._ready[wanted] = done
            return []
        if isinstance(outcome, AdapterWeights):
            why = f"the adapter in {done.path} has changed since it was loaded: load it again"
        else:
            why = str(outcome)
        refused = [each for each in self._waiting if each.request.adapter_digest == wanted]
        self._waiting = [each for each in self._waiting if each not in refused]
        self._read_ahead()
        return [
            (each, _refused(each.request, "invalid", why))
            for each in refused
            if not each.is_finished
        ]

    def check(self, asked: wire.CheckAdapter) -> wire.AdapterChecked | None:
        """Check an adapter for a router. Returns the answer if it is known; otherwise `checked`
        does."""
        error = None
        if self._reader is None:
            error = "this engine was started without --adapter and --max-adapters"
        elif self._checks >= MAX_CHECKS:
            error = "too many adapters are being read"
        if error is not None:
            return _checked(asked, AdapterError(error))
        assert self._reader is not None
        self._checks += 1
        self._reader.start(asked.path, asked)
        return None

    def checked(self, asked: wire.CheckAdapter, done: AdapterRead) -> wire.AdapterChecked:
        """Return the answer to a router, after the adapter was read for it."""
        self._checks -= 1
        return _checked(asked, done.outcome)

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()

    def _place_for(
        self, request: wire.Submit, used: set[int], withdrawable: Set[int]
    ) -> int | None:
        places, digest = self._places, request.adapter_digest
        assert places is not None
        if self._closing is None or digest != self._closing:
            place = places.find(digest)
            if place is not None:
                return place
        if digest not in self._ready or self._closing is not None:
            return None
        if used and not places.has_free and self._clock() < self._next_swap_at:
            return None
        place = self._put(digest, used)
        if place is not None:
            return place
        self._closing = places.digests[0]
        if not request.is_background:
            victim = places.victim(used.difference(withdrawable))
            if victim is not None:
                self._closing, self.wanted_place = victim, places.place_of(victim)
        return None

    def _put(self, digest: str, used: Collection[int]) -> int | None:
        """Return the place that the read adapter now has, None if all are in ``used``."""
        assert self._places is not None
        done, began = self._ready[digest], self._clock()
        assert isinstance(done.outcome, AdapterWeights)
        place = self._places.put(done.outcome, used)
        if place is not None:
            del self._ready[digest]
            ended = self._clock()
            took_s = done.seconds + ended - began
            self._next_swap_at = ended + took_s * (1 - SWAP_SHARE) / SWAP_SHARE
        return place

    def _read_ahead(self) -> None:
        """Read the adapters of the first waiting requests."""
        assert self._reader is not None
        for waiter in self._waiting:
            if len(self._reading) + len(self._ready) >= MAX_AHEAD:
                return
            adapter = waiter.request.adapter
            assert adapter is not None and self._places is not None
            known = adapter.digest in self._ready or adapter.digest in self._places.digests
            if not known and adapter.path not in self._reading:
                self._reading[adapter.path] = adapter.digest
                self._reader.start(adapter.path)


def _checked(
    check: wire.CheckAdapter, outcome: AdapterWeights | AdapterError
) -> wire.AdapterChecked:
    if isinstance(outcome, AdapterError):
        return wire.AdapterChecked(
            name=check.name, path=check.path, number=check.number, error=str(outcome)
        )
    found = wire.AdapterRef(
        name=check.name, path=check.path, digest=outcome.digest, rank=outcome.rank
    )
    return wire.AdapterChecked(name=check.name, path=check.path, number=check.number, adapter=found)


def _refused(request: wire.Submit, reason: wire.RefusalReason, message: str) -> wire.Refused:
    return wire.Refused.of(request, reason, message, "model")
