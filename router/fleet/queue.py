"""The order in which waiting sequences get a place: priority, fairness between keys, age."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator

from router.fleet.flight import Flight, FlightState

TURN_OF_AGE = 8
"""Every so many departures one goes by age, whatever its priority."""

_Lane = list[tuple[float, int, Flight]]


class FairQueue:
    """Waiting flights of one model.

    The highest priority goes first; within it the API key that has the fewest
    sequences in engines now; within that the oldest.

    So that nobody waits for ever, each eighth departure is the turn of age: keys take these
    turns one after the other, in the order in which they began to wait, and each gives its
    own to its oldest flight. So one that finds m older ones of its key waiting goes within
    8 * keys * (m + 1) departures, where ``keys`` is how many keys wait at once, at most.
    """

    def __init__(self) -> None:
        self._lanes: dict[int, dict[str, _Lane]] = {}
        self._keys: dict[str, int] = {}
        """How many wait of each key; the one whose turn of age is next first."""
        self._pushed = 0
        self._departed = 0
        self._waiting: set[Flight] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Flight]:
        return iter(list(self._waiting))

    def push(self, flight: Flight) -> None:
        """Also for one that has waited before: its age counts from its arrival."""
        lane = self._lanes.setdefault(flight.order.priority, {}).setdefault(flight.key, [])
        self._pushed += 1
        heapq.heappush(lane, (flight.arrived, self._pushed, flight))
        self._waiting.add(flight)
        self._keys[flight.key] = self._keys.get(flight.key, 0) + 1

    def discard(self, flight: Flight) -> None:
        """Its entry is passed over when it comes up."""
        if flight in self._waiting:
            self._waiting.discard(flight)
            self._count_out(flight.key)

    def pop(self, running: Counter[str]) -> Flight | None:
        """The next one; ``running`` counts the sequences in engines by key."""
        self._drop_gone()
        if not self._lanes:
            return None
        self._departed += 1
        turn_of_age = self._departed % TURN_OF_AGE == 0
        lane = self._by_age() if turn_of_age else self._by_priority(running)
        flight = heapq.heappop(lane)[2]
        self._waiting.discard(flight)
        self._count_out(flight.key)
        return flight

    def _by_priority(self, running: Counter[str]) -> _Lane:
        lanes = self._lanes[max(self._lanes)]
        return lanes[min(lanes, key=lambda key: (running[key], lanes[key][0][:2]))]

    def _by_age(self) -> _Lane:
        key = next(iter(self._keys))
        self._keys[key] = self._keys.pop(key)  # the next turn is another one's
        return _oldest(lanes[key] for lanes in self._lanes.values() if key in lanes)

    def _count_out(self, key: str) -> None:
        self._keys[key] -= 1
        if not self._keys[key]:
            del self._keys[key]

    def _drop_gone(self) -> None:
        """Takes out what no longer waits from the heads of all lanes, and empty lanes."""
        for priority, lanes in list(self._lanes.items()):
            for key, lane in list(lanes.items()):
                while lane and not self._still_waits(lane[0][2]):
                    heapq.heappop(lane)
                if not lane:
                    del lanes[key]
            if not lanes:
                del self._lanes[priority]

    def _still_waits(self, flight: Flight) -> bool:
        if flight in self._waiting and flight.state is not FlightState.WAITING:
            self.discard(flight)
        return flight in self._waiting


def _oldest(lanes: Iterable[_Lane]) -> _Lane:
    return min(lanes, key=lambda lane: lane[0][:2])
