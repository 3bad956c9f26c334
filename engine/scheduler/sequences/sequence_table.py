"""Every live sequence, by request id and by status."""

from __future__ import annotations

import heapq

from engine.plan import Slot
from engine.scheduler.sequences.sequence import ARRIVING, HOLDING_SLOT, Sequence, Status

_QUEUED_STATUSES = (Status.WAITING, Status.PREEMPTED)


class WaitingQueue:
    """Sequences that wait for a slot, in their `order`. One that ends in the meantime stays as a
    dead entry until it reaches the head, or until half the entries are dead."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], Sequence]] = []
        self._dead = 0

    def __len__(self) -> int:
        return len(self._heap) - self._dead

    def push(self, seq: Sequence) -> None:
        heapq.heappush(self._heap, (seq.order, seq))

    def peek(self) -> Sequence | None:
        """Return the head of the queue, None if the queue is empty."""
        while self._heap and self._heap[0][1].status not in _QUEUED_STATUSES:
            heapq.heappop(self._heap)
            self._dead -= 1
        return self._heap[0][1] if self._heap else None

    def pop(self) -> Sequence:
        """Remove and return what `peek` returned."""
        return heapq.heappop(self._heap)[1]

    def mark_dead(self) -> None:
        """Count another entry whose sequence no longer waits."""
        self._dead += 1
        if self._dead * 2 > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[1].status in _QUEUED_STATUSES]
            heapq.heapify(self._heap)
            self._dead = 0


class SequenceTable:
    """The sequences by request id and by status, and the slots being vacated."""

    def __init__(self) -> None:
        self.live: dict[str, Sequence] = {}
        self.waiting = WaitingQueue()
        self.loading: dict[int, Sequence] = {}  # by ticket of their fetch
        self.leaving: list[Sequence] = []
        """Finished sequences that keep their slots: their state is still to be saved, or they are
        in an open pass."""
        self.vacated: list[Slot] = []  # free from the next plan on
        self._by_status: dict[Status, dict[Sequence, None]] = {each: {} for each in HOLDING_SLOT}

    def count(self, *statuses: Status) -> int:
        return sum(len(self._by_status[status]) for status in statuses)

    @property
    def adapters(self) -> tuple[set[int], set[int]]:
        """The adapter places of all sequences, also of those whose last blocks are being saved,
        and the places whose sequences may all be withdrawn: those of batches. A sequence that
        sends log-probabilities of its prompt stays, because they would be sent twice."""
        used = {seq.adapter for seq in (*self.live.values(), *self.leaving)}
        needed = {
            seq.adapter
            for seq in self.live.values()
            if not seq.is_background or seq.needs_prompt_logprobs
        }
        return used, used - needed - {0}

    def arriving(self) -> list[Sequence]:
        """Return the sequences that are not accepted yet."""
        return [seq for seq in self.live.values() if seq.status in ARRIVING]

    def has_foreground(self, *statuses: Status) -> bool:
        """Return whether any sequence with one of ``statuses`` is not a background sequence."""
        return any(not seq.is_background for each in statuses for seq in self._by_status[each])

    @property
    def num_running(self) -> int:
        return self.count(*HOLDING_SLOT)

    def ordered(self, *statuses: Status) -> list[Sequence]:
        """Return the sequences with one of ``statuses``, which hold a slot, in their `order`."""
        members = [seq for status in statuses for seq in self._by_status[status]]
        return sorted(members, key=lambda seq: seq.order)

    def with_slot(self) -> list[Sequence]:
        """Return the live sequences that hold a slot, in their `order`, including those that a plan
        being built has preempted."""
        held = [seq for seq in self.live.values() if seq.slot is not None]
        return sorted(held, key=lambda seq: seq.order)

    def set_status(self, seq: Sequence, status: Status) -> None:
        """Move ``seq``, which has a slot, to ``status``."""
        self._leave(seq)
        seq.status = status
        self._by_status[status][seq] = None

    def enqueue(self, seq: Sequence, status: Status = Status.WAITING) -> None:
        self._leave(seq)
        seq.status = status
        self.waiting.push(seq)

    def start_loading(self, seq: Sequence, ticket: int) -> None:
        """Move ``seq``, just taken from the queue, to those that wait for the kvstore."""
        seq.status = Status.LOADING
        self.loading[ticket] = seq

    def preempt(self, seq: Sequence) -> None:
        """Exclude ``seq`` from planning; it keeps its slot until `vacate`."""
        self._leave(seq)
        seq.status = Status.PREEMPTED

    def vacate(self, seq: Sequence) -> None:
        if seq.slot is not None:
            self.vacated.append(seq.slot)
            seq.slot = None

    def drop_slots(self) -> None:
        """Forget all slots, because they no longer exist."""
        self.leaving.clear()
        self.vacated.clear()
        for seq in self.live.values():
            seq.slot = None

    def finish(self, seq: Sequence) -> None:
        """End ``seq``, whatever its status is."""
        del self.live[seq.request.request_id]
        was = seq.status
        self._leave(seq)
        seq.status = Status.FINISHED
        if was in _QUEUED_STATUSES:
            self.waiting.mark_dead()
        elif was is Status.LOADING:
            ticket = next(number for number, other in self.loading.items() if other is seq)
            del self.loading[ticket]
        if seq.slot is not None:
            self.leaving.append(seq)

    def _leave(self, seq: Sequence) -> None:
        if seq.status in self._by_status:
            del self._by_status[seq.status][seq]
