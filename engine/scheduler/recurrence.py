"""Where the state of recurrent layers is kept, so that prefixes can be reused.

Such layers have one state of a sequence, not something for each token: a prefix is of use
only up to where somebody's state was kept, and that must be done while it is there. So
snapshots are taken at block boundaries from which others are likely to go on:

* near the end of a prompt: the same again, or the next turn of a conversation whose
  template drops part of the answer;
* at the last boundary of an answer: the next turn otherwise;
* where a prompt parts from one that was seen before, or from another that waits for it;
* here and there in long prompts, where a chunk ends anyway.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as SequenceOf

from engine.scheduler.config import SchedulerConfig
from engine.scheduler.draft import Draft
from engine.scheduler.memory import Memory
from engine.scheduler.sequence import Sequence

TAIL_TOKENS = 8
"""The end of a prompt that is left out of its snapshot: what a template puts before an answer
may look different in the next turn."""
WORTHWHILE_TOKENS = 64
"""Fewer are rather computed again than waited for, or cut out of a chunk: a chunk of its own
takes about as long."""
INTERVAL_TOKENS = 1024
MOST_BETWEEN = 4
"""How far apart snapshots inside of a prompt are at least, and how many there are at most."""
REMEMBERED = 65536
"""Blocks of prompts, to see where the next one parts from them."""


class StateKeeper:
    """Says where prefill stops to have state kept, and keeps it. Does nothing for models
    without recurrent state."""

    def __init__(self, config: SchedulerConfig, memory: Memory) -> None:
        self._config = config
        self._size = config.block_size
        self._memory = memory
        self._seen: OrderedDict[bytes, None] = OrderedDict()
        self._stops: dict[Sequence, list[int]] = {}

    def begin(self, seq: Sequence) -> None:
        """Marks where the prompt of ``seq``, which has a slot now, will be kept."""
        if not self._config.reuses_states:
            return
        seq.kept = seq.computed
        end = max(0, seq.target - TAIL_TOKENS) // self._size * self._size
        parting = self._size * self._count_seen(seq.hashes)
        self._remember(seq.hashes)
        seq.marks = (parting, end) if parting < end else (end,)

    def limits(self, prefilling: SequenceOf[Sequence]) -> dict[Sequence, int]:
        """How far each of ``prefilling``, in order, may compute in this step. Who is not in
        it waits for state that somebody ahead is about to leave on its way."""
        if not self._config.reuses_states:
            return {seq: seq.target for seq in prefilling}
        self._stops = {seq: self._marks_ahead(seq) for seq in prefilling}
        waiting = set()
        for number, seq in enumerate(prefilling):
            for ahead in prefilling[:number]:
                shared = self._shared(ahead, seq)
                if shared > ahead.computed and shared - seq.computed >= WORTHWHILE_TOKENS:
                    stops = self._stops[ahead]
                    if not any(shared - WORTHWHILE_TOKENS < stop <= shared for stop in stops):
                        stops.append(shared)
                    waiting.add(seq)
                    break
        return {
            seq: min(self._stops[seq], default=seq.target)
            for seq in prefilling
            if seq not in waiting
        }

    def after_chunk(self, seq: Sequence, draft: Draft) -> None:
        """Keeps the state that a chunk of this plan leaves, where it is wanted."""
        if not self._config.reuses_states:
            return
        stops = self._stops.get(seq, ())
        if seq.computed in stops or seq.computed - seq.kept >= _interval(seq.target):
            self._keep(seq, draft)

    def after_decode(self, seq: Sequence, draft: Draft) -> None:
        """Keeps the newest state at a block boundary. The tokens up to there may not be known
        yet, and most of these are not needed: it gets its name in `settle`."""
        if seq.computed % self._size or not self._config.reuses_states:
            return
        old = seq.trail
        if old is not None and self._memory.snapshots.holds(old):
            if old.pins:
                return
            self._memory.drop_snapshot(old)
        seq.trail = self._memory.add_snapshot(None)
        if seq.trail is not None:
            seq.trail_position = seq.computed
            draft.save_state(seq, seq.trail)

    def touch(self, seq: Sequence) -> None:
        """Marks what `after_decode` kept as used: ``seq`` will want it back."""
        if seq.trail is not None:
            self._memory.snapshots.refresh([seq.trail.hash])

    def settle(self, seq: Sequence) -> None:
        """Lets others find what `after_decode` kept, once ``seq`` is not decoding any more
        and its tokens are known."""
        trail, seq.trail = seq.trail, None
        if trail is None or not self._memory.snapshots.holds(trail):
            return
        number = seq.trail_position // self._size
        if number > len(seq.hashes) or not self._memory.snapshots.publish(
            trail, seq.hashes[number - 1]
        ):
            self._memory.drop_snapshot(trail)

    def is_owed(self, seq: Sequence) -> bool:
        """Whether the state in the slot of ``seq``, which must leave it, is worth keeping."""
        fits = seq.computed % self._size == 0 and seq.computed <= len(seq.tokens)
        return fits and seq.computed - seq.kept >= WORTHWHILE_TOKENS and self._config.reuses_states

    def before_leaving(self, seq: Sequence, draft: Draft) -> None:
        if self.is_owed(seq):
            self._keep(seq, draft)

    def reach(self, seq: Sequence, first: int, end: int) -> int:
        """Up to which block ``seq``, which has ``first``, could go on from those up to
        ``end``: that at the end of which there is state."""
        if not self._config.reuses_states:
            return end
        return self._memory.snapshots.longest(seq.hashes, first, end)

    def refresh(self, seq: Sequence, end: int) -> None:
        """Marks the snapshot as used that ``seq`` will begin with."""
        if self._config.reuses_states and (number := self.reach(seq, 0, end)):
            self._memory.snapshots.refresh([seq.hashes[number - 1]])

    def restore(self, seq: Sequence, number: int, draft: Draft) -> None:
        """Brings the slot to the state after ``number`` blocks."""
        if not self._config.reuses_states:
            return
        snapshot = self._memory.snapshots.get(seq.hashes[number - 1])
        assert snapshot is not None
        self._memory.snapshots.pin(snapshot)
        draft.restore_state(seq, number * self._size, snapshot)

    def _marks_ahead(self, seq: Sequence) -> list[int]:
        """Those of its marks that are worth a chunk's end; that at its own end is so sooner,
        since the next turn is more likely than anything else."""
        *partings, end = seq.marks
        marks = [mark for mark in partings if mark - seq.kept >= WORTHWHILE_TOKENS]
        if end - seq.kept >= 2 * self._size:
            marks.append(end)
        return [mark for mark in marks if mark > seq.computed]

    def _keep(self, seq: Sequence, draft: Draft) -> None:
        number, rest = divmod(seq.computed, self._size)
        if rest or not 0 < number <= len(seq.hashes):
            return
        seq.kept = seq.computed
        block_hash = seq.hashes[number - 1]
        if block_hash in self._memory.snapshots:
            self._memory.snapshots.refresh([block_hash])
            return
        snapshot = self._memory.add_snapshot(block_hash)
        if snapshot is not None:
            draft.save_state(seq, snapshot)

    def _shared(self, ahead: Sequence, seq: Sequence) -> int:
        """How many tokens, in full blocks, ``ahead`` will have computed that ``seq`` needs;
        0 where they are not even alike in the next block of ``seq``."""
        low = seq.computed // self._size
        high = min(len(seq.hashes), seq.restorable // self._size, ahead.target // self._size)
        if low >= high or seq.hashes[low] != ahead.hashes[low]:
            return 0
        while high - low > 1:
            middle = (low + high) // 2
            if seq.hashes[middle] == ahead.hashes[middle]:
                low = middle
            else:
                high = middle
        return high * self._size

    def _count_seen(self, hashes: SequenceOf[bytes]) -> int:
        for number, block_hash in enumerate(hashes):
            if block_hash not in self._seen:
                return number
        return len(hashes)

    def _remember(self, hashes: SequenceOf[bytes]) -> None:
        """The heads of chains last, since a chain is worth nothing without its head."""
        for block_hash in reversed(hashes):
            self._seen[block_hash] = None
            self._seen.move_to_end(block_hash)
        while len(self._seen) > REMEMBERED:
            self._seen.popitem(last=False)


def _interval(length: int) -> int:
    """How far apart snapshots inside of a prompt of ``length`` tokens are."""
    interval = INTERVAL_TOKENS
    while length > MOST_BETWEEN * interval:
        interval *= 2
    return interval
