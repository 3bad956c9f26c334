"""The order in which queued sequences are placed: priority, fairness between keys, age."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator

from router.fleet.sequences.remote_request import RemoteRequest, RemoteRequestState

AGE_TURN_EVERY = 8
"""One in this many departures is by age, regardless of priority."""

_Lane = list[tuple[float, int, RemoteRequest]]


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
        self._lanes: dict[tuple[int, str, bool], _Lane] = {}
        """By priority, key, and whether its sequences name adapters: not every engine supports
        those."""
        self._waiting_by_key: dict[str, int] = {}
        """The number of queued sequences by key, in the order of the keys' departures by age."""
        self._pushed = 0
        self._popped = 0
        self._waiting: set[RemoteRequest] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[RemoteRequest]:
        return iter(list(self._waiting))

    def push(self, sequence: RemoteRequest) -> None:
        """Add a sequence, possibly one that was queued before: age counts from its arrival."""
        kind = sequence.priority, sequence.key, sequence.names_adapter
        lane = self._lanes.setdefault(kind, [])
        self._pushed += 1
        heapq.heappush(lane, (sequence.arrived_at, self._pushed, sequence))
        self._waiting.add(sequence)
        self._waiting_by_key[sequence.key] = self._waiting_by_key.get(sequence.key, 0) + 1

    def discard(self, sequence: RemoteRequest) -> None:
        """Remove a sequence if it is queued. Its entry is skipped later."""
        if sequence in self._waiting:
            self._waiting.discard(sequence)
            self._count_out(sequence.key)

    def num_waiting_of(self, key: str) -> int:
        return self._waiting_by_key.get(key, 0)

    def num_ahead(self, key: str, priority: int, running: Counter[str]) -> int:
        """Return how many queued sequences go before a new one, if no others arrive.

        Departures by age are ignored; they only delay it.
        """
        waiting: Counter[tuple[int, str]] = Counter()
        for (step, other, _), lane in self._lanes.items():
            waiting[step, other] += len(lane)
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
        sequence = heapq.heappop(lane)[2]
        self._waiting.discard(sequence)
        self._count_out(sequence.key)
        return sequence

    def has_next(self, is_held_back: Callable[[RemoteRequest], bool]) -> bool:
        """Return whether `pop` would return one."""
        return bool(self._free_lanes(is_held_back))

    def _free_lanes(self, is_held_back: Callable[[RemoteRequest], bool]) -> list[_Lane]:
        self._drop_stale()
        return [lane for lane in self._lanes.values() if not is_held_back(lane[0][2])]

    def _by_age(self, free: list[_Lane]) -> _Lane:
        keys = {lane[0][2].key for lane in free}
        key = next(key for key in self._waiting_by_key if key in keys)
        self._waiting_by_key[key] = self._waiting_by_key.pop(key)  # to the end of the order
        return min((lane for lane in free if lane[0][2].key == key), key=_age)

    def _count_out(self, key: str) -> None:
        self._waiting_by_key[key] -= 1
        if not self._waiting_by_key[key]:
            del self._waiting_by_key[key]

    def _drop_stale(self) -> None:
        """Remove entries that are no longer queued from the heads of lanes, and empty lanes."""
        for kind, lane in list(self._lanes.items()):
            while lane and not self._is_waiting(lane[0][2]):
                heapq.heappop(lane)
            if not lane:
                del self._lanes[kind]

    def _is_waiting(self, sequence: RemoteRequest) -> bool:
        if sequence in self._waiting and sequence.state is not RemoteRequestState.WAITING:
            self.discard(sequence)
        return sequence in self._waiting


def _by_priority(free: list[_Lane], running: Counter[str]) -> _Lane:
    def rank(lane: _Lane) -> tuple[int, int, tuple[float, int]]:
        first = lane[0][2]
        return -first.priority, running[first.key], _age(lane)

    return min(free, key=rank)


def _age(lane: _Lane) -> tuple[float, int]:
    return lane[0][:2]
