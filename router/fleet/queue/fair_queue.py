"""The order in which queued sequences are placed: priority, fairness between keys, age."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

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
        self._lanes: dict[int, dict[str, _Lane]] = {}
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
        lane = self._lanes.setdefault(sequence.priority, {}).setdefault(sequence.key, [])
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
        own = running[key] + sum(
            len(lanes.get(key, ())) for step, lanes in self._lanes.items() if step >= priority
        )
        ahead = 0
        for step, lanes in self._lanes.items():
            for other, lane in lanes.items():
                if step > priority or (step == priority and other == key):
                    ahead += len(lane)
                elif step == priority:
                    ahead += min(len(lane), max(0, own + 1 - running[other]))
        return ahead

    def pop(
        self,
        running: Counter[str],
        is_held_back: Callable[[RemoteRequest], bool] = lambda _: False,
    ) -> RemoteRequest | None:
        """Return the next sequence, if any; ``running`` counts the sequences in engines by key.

        Keys whose next sequence ``is_held_back`` are skipped.
        """
        held = self._held(is_held_back)
        if held.issuperset(self._waiting_by_key):
            return None
        self._popped += 1
        turn_of_age = self._popped % AGE_TURN_EVERY == 0
        lane = self._by_age(held) if turn_of_age else self._by_priority(running, held)
        sequence = heapq.heappop(lane)[2]
        self._waiting.discard(sequence)
        self._count_out(sequence.key)
        return sequence

    def has_next(self, is_held_back: Callable[[RemoteRequest], bool]) -> bool:
        """Return whether `pop` would return one."""
        return not self._held(is_held_back).issuperset(self._waiting_by_key)

    def _held(self, is_held_back: Callable[[RemoteRequest], bool]) -> set[str]:
        self._drop_stale()
        return {
            key
            for lanes in self._lanes.values()
            for key, lane in lanes.items()
            if is_held_back(lane[0][2])
        }

    def _by_priority(self, running: Counter[str], held: set[str]) -> _Lane:
        lanes = next(
            lanes for _, lanes in sorted(self._lanes.items(), reverse=True) if lanes.keys() - held
        )
        return lanes[min(lanes.keys() - held, key=lambda key: (running[key], lanes[key][0][:2]))]

    def _by_age(self, held: set[str]) -> _Lane:
        key = next(key for key in self._waiting_by_key if key not in held)
        self._waiting_by_key[key] = self._waiting_by_key.pop(key)  # to the end of the order
        return _oldest(lanes[key] for lanes in self._lanes.values() if key in lanes)

    def _count_out(self, key: str) -> None:
        self._waiting_by_key[key] -= 1
        if not self._waiting_by_key[key]:
            del self._waiting_by_key[key]

    def _drop_stale(self) -> None:
        """Remove entries that are no longer queued from the heads of lanes, and empty lanes."""
        for priority, lanes in list(self._lanes.items()):
            for key, lane in list(lanes.items()):
                while lane and not self._is_waiting(lane[0][2]):
                    heapq.heappop(lane)
                if not lane:
                    del lanes[key]
            if not lanes:
                del self._lanes[priority]

    def _is_waiting(self, sequence: RemoteRequest) -> bool:
        if sequence in self._waiting and sequence.state is not RemoteRequestState.WAITING:
            self.discard(sequence)
        return sequence in self._waiting


def _oldest(lanes: Iterable[_Lane]) -> _Lane:
    return min(lanes, key=lambda lane: lane[0][:2])
