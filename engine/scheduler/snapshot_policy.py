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
from engine.scheduler.memory import Memory
from engine.scheduler.plan_builder import PlanBuilder
from engine.scheduler.sequence import Sequence

PROMPT_TAIL_TOKENS = 8
"""The end of a prompt that is left out of its snapshot: what a template puts before an answer
may look different in the next turn."""
WORTHWHILE_TOKENS = 64
"""Fewer are rather computed again than waited for, or cut out of a chunk: a chunk of its own
takes about as long."""
SNAPSHOT_INTERVAL_TOKENS = 1024
MAX_INNER_SNAPSHOTS = 4
"""How far apart snapshots inside of a prompt are at least, and how many there are at most."""
MAX_SEEN_BLOCKS = 65536
"""Blocks of prompts, to see where the next one parts from them."""


class SnapshotPolicy:
    """Says where prefill stops to have state kept, and keeps it. Does nothing for models
    without recurrent state."""

    def __init__(self, config: SchedulerConfig, memory: Memory) -> None:
        self._config = config
        self._block_size = config.block_size
        self._memory = memory
        self._seen: OrderedDict[bytes, None] = OrderedDict()
        self._stops: dict[Sequence, list[int]] = {}

    def choose_positions(self, seq: Sequence) -> None:
        """Marks where the prompt of ``seq``, which has a slot now, will be kept."""
        if not self._config.reuses_states:
            return
        seq.last_snapshot_position = seq.num_computed_tokens
        end = max(0, seq.prefill_end - PROMPT_TAIL_TOKENS) // self._block_size * self._block_size
        parting = self._block_size * self._count_seen(seq.block_hashes)
        self._remember(seq.block_hashes)
        seq.snapshot_positions = (parting, end) if parting < end else (end,)

    def prefill_limits(self, prefilling: SequenceOf[Sequence]) -> dict[Sequence, int]:
        """How far each of ``prefilling``, in order, may compute in this step. Who is not in
        it waits for state that somebody ahead is about to leave on its way."""
        if not self._config.reuses_states:
            return {seq: seq.prefill_end for seq in prefilling}
        self._stops = {seq: self._positions_ahead(seq) for seq in prefilling}
        waiting = set()
        for number, seq in enumerate(prefilling):
            for ahead in prefilling[:number]:
                shared = self._shared_tokens(ahead, seq)
                if (
                    shared > ahead.num_computed_tokens
                    and shared - seq.num_computed_tokens >= WORTHWHILE_TOKENS
                ):
                    stops = self._stops[ahead]
                    if not any(shared - WORTHWHILE_TOKENS < stop <= shared for stop in stops):
                        stops.append(shared)
                    waiting.add(seq)
                    break
        return {
            seq: min(self._stops[seq], default=seq.prefill_end)
            for seq in prefilling
            if seq not in waiting
        }

    def after_chunk(self, seq: Sequence, builder: PlanBuilder) -> None:
        """Keeps the state that a chunk of this plan leaves, where it is wanted."""
        if not self._config.reuses_states:
            return
        stops = self._stops.get(seq, ())
        if (
            seq.num_computed_tokens in stops
            or seq.num_computed_tokens - seq.last_snapshot_position >= _interval(seq.prefill_end)
        ):
            self._save(seq, builder)

    def after_decode(self, seq: Sequence, builder: PlanBuilder) -> None:
        """Keeps the newest state at a block boundary. The tokens up to there may not be known
        yet, and most of these are not needed: it gets its name in `publish_trailing`."""
        if seq.num_computed_tokens % self._block_size or not self._config.reuses_states:
            return
        old = seq.trailing_snapshot
        if old is not None and self._memory.snapshots.holds(old):
            if old.pins:
                return
            self._memory.drop_snapshot(old)
        seq.trailing_snapshot = self._memory.add_snapshot(None)
        if seq.trailing_snapshot is not None:
            seq.trailing_position = seq.num_computed_tokens
            builder.save_state(seq, seq.trailing_snapshot)

    def touch_trailing(self, seq: Sequence) -> None:
        """Marks what `after_decode` kept as used: ``seq`` will want it back."""
        if seq.trailing_snapshot is not None:
            self._memory.snapshots.touch([seq.trailing_snapshot.hash])

    def publish_trailing(self, seq: Sequence) -> None:
        """Lets others find what `after_decode` kept, once ``seq`` is not decoding any more
        and its tokens are known."""
        snapshot, seq.trailing_snapshot = seq.trailing_snapshot, None
        if snapshot is None or not self._memory.snapshots.holds(snapshot):
            return
        number = seq.trailing_position // self._block_size
        if number > len(seq.block_hashes) or not self._memory.snapshots.publish(
            snapshot, seq.block_hashes[number - 1]
        ):
            self._memory.drop_snapshot(snapshot)

    def is_worth_saving(self, seq: Sequence) -> bool:
        """Whether the state in the slot of ``seq``, which must leave it, is worth keeping."""
        fits = seq.num_computed_tokens % self._block_size == 0 and seq.num_computed_tokens <= len(
            seq.token_ids
        )
        return (
            fits
            and seq.num_computed_tokens - seq.last_snapshot_position >= WORTHWHILE_TOKENS
            and self._config.reuses_states
        )

    def before_leaving(self, seq: Sequence, builder: PlanBuilder) -> None:
        if self.is_worth_saving(seq):
            self._save(seq, builder)

    def restorable_end(self, seq: Sequence, first: int, end: int) -> int:
        """Up to which block ``seq``, which has ``first``, could go on from those up to
        ``end``: that at the end of which there is state."""
        if not self._config.reuses_states:
            return end
        return self._memory.snapshots.longest_prefix(seq.block_hashes, first, end)

    def touch_prefix(self, seq: Sequence, end: int) -> None:
        """Marks the snapshot as used that ``seq`` will begin with."""
        if self._config.reuses_states and (number := self.restorable_end(seq, 0, end)):
            self._memory.snapshots.touch([seq.block_hashes[number - 1]])

    def restore(self, seq: Sequence, number: int, builder: PlanBuilder) -> None:
        """Brings the slot to the state after ``number`` blocks."""
        if not self._config.reuses_states:
            return
        snapshot = self._memory.snapshots.get(seq.block_hashes[number - 1])
        assert snapshot is not None
        self._memory.snapshots.pin(snapshot)
        builder.restore_state(seq, number * self._block_size, snapshot)

    def _positions_ahead(self, seq: Sequence) -> list[int]:
        """Those of its marks that are worth a chunk's end; that at its own end is so sooner,
        since the next turn is more likely than anything else."""
        *partings, end = seq.snapshot_positions
        positions = [
            position
            for position in partings
            if position - seq.last_snapshot_position >= WORTHWHILE_TOKENS
        ]
        if end - seq.last_snapshot_position >= 2 * self._block_size:
            positions.append(end)
        return [position for position in positions if position > seq.num_computed_tokens]

    def _save(self, seq: Sequence, builder: PlanBuilder) -> None:
        number, rest = divmod(seq.num_computed_tokens, self._block_size)
        if rest or not 0 < number <= len(seq.block_hashes):
            return
        seq.last_snapshot_position = seq.num_computed_tokens
        block_hash = seq.block_hashes[number - 1]
        if block_hash in self._memory.snapshots:
            self._memory.snapshots.touch([block_hash])
            return
        snapshot = self._memory.add_snapshot(block_hash)
        if snapshot is not None:
            builder.save_state(seq, snapshot)

    def _shared_tokens(self, ahead: Sequence, seq: Sequence) -> int:
        """How many tokens, in full blocks, ``ahead`` will have computed that ``seq`` needs;
        0 where they are not even alike in the next block of ``seq``."""
        low = seq.num_computed_tokens // self._block_size
        high = min(
            len(seq.block_hashes),
            seq.num_restorable_tokens // self._block_size,
            ahead.prefill_end // self._block_size,
        )
        if low >= high or seq.block_hashes[low] != ahead.block_hashes[low]:
            return 0
        while high - low > 1:
            middle = (low + high) // 2
            if seq.block_hashes[middle] == ahead.block_hashes[middle]:
                low = middle
            else:
                high = middle
        return high * self._block_size

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
        while len(self._seen) > MAX_SEEN_BLOCKS:
            self._seen.popitem(last=False)


def _interval(length: int) -> int:
    """How far apart snapshots inside of a prompt of ``length`` tokens are."""
    interval = SNAPSHOT_INTERVAL_TOKENS
    while length > MAX_INNER_SNAPSHOTS * interval:
        interval *= 2
    return interval
