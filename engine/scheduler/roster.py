"""Who is where: every live sequence by its state."""

from __future__ import annotations

import heapq

from engine.plan import Slot
from engine.scheduler.sequence import HOLDING, Sequence, State

_IN_QUEUE = (State.WAITING, State.PREEMPTED)


class WaitingQueue:
    """Sequences that wait for a slot, by priority, then arrival. One that ends
    meanwhile stays as a dead entry until it is met, or until half the entries are dead."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], Sequence]] = []
        self._dead = 0

    def __len__(self) -> int:
        return len(self._heap) - self._dead

    def push(self, seq: Sequence) -> None:
        heapq.heappush(self._heap, (seq.order, seq))

    def peek(self) -> Sequence | None:
        while self._heap and self._heap[0][1].state not in _IN_QUEUE:
            heapq.heappop(self._heap)
            self._dead -= 1
        return self._heap[0][1] if self._heap else None

    def pop(self) -> Sequence:
        """Takes what `peek` showed."""
        return heapq.heappop(self._heap)[1]

    def bury(self) -> None:
        """Says that one entry's sequence is no longer waiting."""
        self._dead += 1
        if self._dead * 2 > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[1].state in _IN_QUEUE]
            heapq.heapify(self._heap)
            self._dead = 0


class Roster:
    """The sequences by request id and by state, and the slots on their way out.

    ``leaving`` are finished sequences whose last blocks may still be saved out of
    their slots. ``vacated`` are slots that the next plan may give to somebody else.
    """

    def __init__(self) -> None:
        self.live: dict[str, Sequence] = {}
        self.waiting = WaitingQueue()
        self.loading: dict[int, Sequence] = {}
        self.leaving: list[Sequence] = []
        self.vacated: list[Slot] = []
        self._holding: dict[State, dict[Sequence, None]] = {state: {} for state in HOLDING}

    def count(self, *states: State) -> int:
        return sum(len(self._holding[state]) for state in states)

    @property
    def holders(self) -> int:
        return self.count(*HOLDING)

    def ordered(self, *states: State) -> list[Sequence]:
        """Those that hold a slot in one of ``states``, the one to be served first first."""
        members = [seq for state in states for seq in self._holding[state]]
        return sorted(members, key=lambda seq: seq.order)

    def hold(self, seq: Sequence, state: State) -> None:
        """Moves ``seq``, which has a slot, to ``state``."""
        self._leave(seq)
        seq.state = state
        self._holding[state][seq] = None

    def enqueue(self, seq: Sequence, state: State = State.WAITING) -> None:
        self._leave(seq)
        seq.state = state
        self.waiting.push(seq)

    def load(self, seq: Sequence, ticket: int) -> None:
        """Moves the sequence at the head of the queue to those that wait for the kvstore."""
        seq.state = State.LOADING
        self.loading[ticket] = seq

    def preempt(self, seq: Sequence) -> None:
        """Takes ``seq`` out of those that are planned; its slot stays until `vacate`."""
        self._leave(seq)
        seq.state = State.PREEMPTED

    def vacate(self, seq: Sequence) -> None:
        if seq.slot is not None:
            self.vacated.append(seq.slot)
            seq.slot = None

    def drop_slots(self) -> None:
        """No slot is there any more."""
        self.leaving.clear()
        self.vacated.clear()
        for seq in self.live.values():
            seq.slot = None

    def finish(self, seq: Sequence) -> None:
        """Ends ``seq`` from whatever state it is in."""
        del self.live[seq.request.request_id]
        was = seq.state
        self._leave(seq)
        seq.state = State.FINISHED
        if was in _IN_QUEUE:
            self.waiting.bury()
        elif was is State.LOADING:
            ticket = next(number for number, other in self.loading.items() if other is seq)
            del self.loading[ticket]
        if seq.slot is not None:
            self.leaving.append(seq)

    def _leave(self, seq: Sequence) -> None:
        if seq.state in self._holding:
            del self._holding[seq.state][seq]
