"""The order in which waiting sequences get a place: priority, fairness between keys, age."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator

from router.fleet.remote_sequence import RemoteSequence, RemoteSequenceState

AGE_TURN_EVERY = 8
"""Every so many departures one goes by age, whatever its priority."""

_Lane = list[tuple[float, int, RemoteSequence]]


class FairQueue:
    """Waiting sequences of one model.

    The highest priority goes first; within it the API key that has the fewest
    sequences in engines now; within that the oldest.

    So that nobody waits for ever, each eighth departure is the turn of age: keys take these
    turns one after the other, in the order in which they began to wait, and each gives its
    own to its oldest sequence. So one that finds m older ones of its key waiting goes within
    8 * keys * (m + 1) departures, where ``keys`` is how many keys wait at once, at most.
    """

    def __init__(self) -> None:
        self._lanes: dict[int, dict[str, _Lane]] = {}
        self._waiting_by_key: dict[str, int] = {}
        """How many wait of each key; the one whose turn of age is next first."""
        self._pushed = 0
        self._popped = 0
        self._waiting: set[RemoteSequence] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[RemoteSequence]:
        return iter(list(self._waiting))

    def push(self, sequence: RemoteSequence) -> None:
        """Also for one that has waited before: its age counts from its arrival."""
        lane = self._lanes.setdefault(sequence.spec.priority, {}).setdefault(sequence.key, [])
        self._pushed += 1
        heapq.heappush(lane, (sequence.arrived_at, self._pushed, sequence))
        self._waiting.add(sequence)
        self._waiting_by_key[sequence.key] = self._waiting_by_key.get(sequence.key, 0) + 1

    def discard(self, sequence: RemoteSequence) -> None:
        """Its entry is passed over when it comes up."""
        if sequence in self._waiting:
            self._waiting.discard(sequence)
            self._count_out(sequence.key)

    def pop(self, running: Counter[str]) -> RemoteSequence | None:
        """The next one; ``running`` counts the sequences in engines by key."""
        self._drop_stale()
        if not self._lanes:
            return None
        self._popped += 1
        turn_of_age = self._popped % AGE_TURN_EVERY == 0
        lane = self._by_age() if turn_of_age else self._by_priority(running)
        sequence = heapq.heappop(lane)[2]
        self._waiting.discard(sequence)
        self._count_out(sequence.key)
        return sequence

    def _by_priority(self, running: Counter[str]) -> _Lane:
        lanes = self._lanes[max(self._lanes)]
        return lanes[min(lanes, key=lambda key: (running[key], lanes[key][0][:2]))]

    def _by_age(self) -> _Lane:
        key = next(iter(self._waiting_by_key))
        self._waiting_by_key[key] = self._waiting_by_key.pop(key)  # the next turn is another one's
        return _oldest(lanes[key] for lanes in self._lanes.values() if key in lanes)

    def _count_out(self, key: str) -> None:
        self._waiting_by_key[key] -= 1
        if not self._waiting_by_key[key]:
            del self._waiting_by_key[key]

    def _drop_stale(self) -> None:
        """Takes out what no longer waits from the heads of all lanes, and empty lanes."""
        for priority, lanes in list(self._lanes.items()):
            for key, lane in list(lanes.items()):
                while lane and not self._is_waiting(lane[0][2]):
                    heapq.heappop(lane)
                if not lane:
                    del lanes[key]
            if not lanes:
                del self._lanes[priority]

    def _is_waiting(self, sequence: RemoteSequence) -> bool:
        if sequence in self._waiting and sequence.state is not RemoteSequenceState.WAITING:
            self.discard(sequence)
        return sequence in self._waiting


def _oldest(lanes: Iterable[_Lane]) -> _Lane:
    return min(lanes, key=lambda lane: lane[0][:2])
