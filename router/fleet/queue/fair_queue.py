"""The order in which queued sequences are placed: priority, fairness between keys, age."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from router.fleet.sequences.remote_request import RemoteRequest, RemoteRequestState

AGE_TURN_EVERY = 8
"""One in this many departures is by age, regardless of priority."""

_Kind = tuple[int, str, bool]
"""Priority, key, and whether a sequence names an adapter: not every engine supports those."""


@dataclass(slots=True, eq=False)
class _QueueEntry:
    """A queued sequence, or nothing any more: what it refers to may be large."""

    arrived_at: float
    number: int
    kind: _Kind
    sequence: RemoteRequest | None

    def __lt__(self, other: _QueueEntry) -> bool:
        return self.age < other.age

    @property
    def age(self) -> tuple[float, int]:
        return self.arrived_at, self.number


_Lane = list[_QueueEntry]


class FairQueue:
    """The queued sequences of one model.

    The highest priority goes first; within a priority, the API key with the fewest sequences in
    engines; within a key, the oldest sequence.

    Every eighth departure is by age, because sequences of low priority could starve otherwise. The
    keys take these departures in the order in which they began to wait, each for its oldest
    sequence. A sequence behind m older ones of its key therefore departs within 8 * keys * (m + 1)
    departures, where ``keys`` is the largest number of keys waiting at once.
    """

    def __init__(self) -> None:
        self._lanes: dict[_Kind, _Lane] = {}
        """Heaps by age."""
        self._num_waiting: Counter[_Kind] = Counter()
        self._waiting_by_key: dict[str, int] = {}
        """The number of queued sequences by key, in the order of the keys' departures by age."""
        self._pushed = 0
        self._popped = 0
        self._waiting: dict[RemoteRequest, _QueueEntry] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[RemoteRequest]:
        return iter(list(self._waiting))

    def push(self, sequence: RemoteRequest) -> None:
        """Add a sequence, possibly one that was queued before: age counts from its arrival."""
        self.discard(sequence)
        kind = sequence.priority, sequence.key, sequence.names_adapter
        self._pushed += 1
        entry = _QueueEntry(sequence.arrived_at, self._pushed, kind, sequence)
        heapq.heappush(self._lanes.setdefault(kind, []), entry)
        self._waiting[sequence] = entry
        self._num_waiting[kind] += 1
        self._waiting_by_key[sequence.key] = self._waiting_by_key.get(sequence.key, 0) + 1

    def discard(self, sequence: RemoteRequest) -> None:
        """Remove a sequence if it is queued."""
        if (entry := self._take(sequence)) is None:
            return
        lane = self._lanes[entry.kind]
        if len(lane) > 2 * self._num_waiting[entry.kind]:  # seldom: half of it is gone
            lane[:] = [each for each in lane if each.sequence is not None]
            heapq.heapify(lane)
        if not lane:
            del self._lanes[entry.kind], self._num_waiting[entry.kind]

    def num_waiting_of(self, key: str) -> int:
        return self._waiting_by_key.get(key, 0)

    def num_ahead(self, key: str, priority: int, running: Counter[str]) -> int:
        """Return how many queued sequences go before a new one, if no others arrive.

        Departures by age are ignored; they only delay it.
        """
        waiting: Counter[tuple[int, str]] = Counter()
        for (step, other, _), count in self._num_waiting.items():
            waiting[step, other] += count
        own = running[key] + sum(
            count for (step, other), count in waiting.items() if step >= priority and other == key
        )
        ahead = 0
        for (step, other), count in waiting.items():
            if step > priority or (step == priority and other == key):
                ahead += count
            elif step == priority:
                ahead += min(count, max(0, own + 1 - running[other]))
        return ahead

    def pop(
        self,
        running: Counter[str],
        is_held_back: Callable[[RemoteRequest], bool] = lambda _: False,
    ) -> RemoteRequest | None:
        """Return the next sequence, if any; ``running`` counts the sequences in engines by key.

        ``is_held_back`` depends on a sequence's key and on whether it names an adapter; those for
        which it is true are skipped.
        """
        free = self._free_lanes(is_held_back)
        if not free:
            return None
        self._popped += 1
        turn_of_age = self._popped % AGE_TURN_EVERY == 0
        lane = self._by_age(free) if turn_of_age else _by_priority(free, running)
        sequence = heapq.heappop(lane).sequence
        assert sequence is not None
        self._take(sequence)
        return sequence

    def has_next(self, is_held_back: Callable[[RemoteRequest], bool]) -> bool:
        """Return whether `pop` would return one."""
        return bool(self._free_lanes(is_held_back))

    def _free_lanes(self, is_held_back: Callable[[RemoteRequest], bool]) -> list[_Lane]:
        self._drop_stale()
        return [lane for lane in self._lanes.values() if not is_held_back(_first(lane))]

    def _by_age(self, free: list[_Lane]) -> _Lane:
        keys = {_first(lane).key for lane in free}
        key = next(key for key in self._waiting_by_key if key in keys)
        self._waiting_by_key[key] = self._waiting_by_key.pop(key)  # to the end of the order
        return min((lane for lane in free if _first(lane).key == key), key=lambda lane: lane[0].age)

    def _take(self, sequence: RemoteRequest) -> _QueueEntry | None:
        """Count ``sequence`` out if it is queued, and return its entry, which is empty then."""
        if (entry := self._waiting.pop(sequence, None)) is None:
            return None
        entry.sequence = None
        self._num_waiting[entry.kind] -= 1
        self._waiting_by_key[sequence.key] -= 1
        if not self._waiting_by_key[sequence.key]:
            del self._waiting_by_key[sequence.key]
        return entry

    def _drop_stale(self) -> None:
        """Remove entries that are no longer queued from the heads of lanes, and empty lanes."""
        for kind, lane in list(self._lanes.items()):
            while lane and not self._is_waiting(lane[0]):
                heapq.heappop(lane)
            if not lane:
                del self._lanes[kind], self._num_waiting[kind]

    def _is_waiting(self, entry: _QueueEntry) -> bool:
        sequence = entry.sequence
        if sequence is not None and sequence.state is not RemoteRequestState.WAITING:
            self._take(sequence)
        return entry.sequence is not None


def _first(lane: _Lane) -> RemoteRequest:
    """Return the oldest sequence of a lane without stale entries at its head."""
    sequence = lane[0].sequence
    assert sequence is not None
    return sequence


def _by_priority(free: list[_Lane], running: Counter[str]) -> _Lane:
    def rank(lane: _Lane) -> tuple[int, int, tuple[float, int]]:
        first = _first(lane)
        return -first.priority, running[first.key], lane[0].age

    return min(free, key=rank)
