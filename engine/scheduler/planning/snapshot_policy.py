"""Decides where snapshots of recurrent state are taken, so that prefixes can be reused.

Recurrent layers have one state per sequence, and nothing per token. A prefix can therefore be
reused only up to a snapshot, which must be taken while the sequence is at that position.
Snapshots are taken at block boundaries from which other sequences are likely to continue:

* near the end of a prompt: for the same prompt again, or for the next turn of a conversation
  whose template drops part of the answer;
* at the last boundary of an answer: for any other next turn;
* where a prompt diverges from an earlier one, or from one that waits for it;
* at some positions of long prompts where a chunk ends anyway.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as SequenceOf

from engine.plan import StateSearch
from engine.scheduler.config import SchedulerConfig
from engine.scheduler.memory import Memory
from engine.scheduler.planning.plan_builder import PlanBuilder
from engine.scheduler.pools.snapshot_pool import Snapshot
from engine.scheduler.sequences.sequence import Sequence

PROMPT_TAIL_TOKENS = 8
"""Tokens at the end of a prompt excluded from its snapshot: the part that a template puts before an
answer may differ in the next turn."""
WORTHWHILE_TOKENS = 64
"""Fewer tokens are computed again instead of waiting for them or giving them their own chunk, which
takes about as long."""
SNAPSHOT_INTERVAL_TOKENS = 1024
"""Min distance of snapshots inside a prompt."""
MAX_INNER_SNAPSHOTS = 4
"""Max number of snapshots inside a prompt."""
MAX_SEEN_BLOCKS = 65536
"""Number of remembered blocks of prompts, to find where the next prompt diverges from them."""


class SnapshotPolicy:
    """Decides where prefill stops for a snapshot, and takes it. Does nothing for models without
    recurrent state."""

    def __init__(self, config: SchedulerConfig, memory: Memory) -> None:
        self._config = config
        self._block_size, self._state_tokens = config.block_size, config.state_tokens
        self._memory = memory
        self._seen: OrderedDict[bytes, None] = OrderedDict()
        self._stops: dict[Sequence, list[int]] = {}

    def choose_positions(self, seq: Sequence) -> None:
        """Choose the positions of snapshots of the prompt of ``seq``, which has a slot now."""
        if not self._config.reuses_states:
            return
        seq.snapshots.newest_position = seq.num_computed_tokens
        end = self._round_down(max(0, seq.prefill_end - PROMPT_TAIL_TOKENS))
        parting = self._round_down(self._block_size * self._count_seen(seq.block_hashes))
        self._remember(seq.block_hashes)
        seq.snapshots.prompt_positions = (parting, end) if parting < end else (end,)

    def prefill_limits(self, prefilling: SequenceOf[Sequence]) -> dict[Sequence, int]:
        """Return the position up to which each of ``prefilling``, in order, may compute in this
        step. A sequence that is missing waits for a snapshot that a sequence ahead is about to
        take."""
        if not self._config.reuses_states:
            return {seq: seq.prefill_end for seq in prefilling}
        self._stops = {seq: self._positions_ahead(seq) for seq in prefilling}
        waiting = set()
        for number, seq in enumerate(prefilling):
            for ahead in prefilling[:number]:
                shared = self._shared_tokens(ahead, seq)
                saved = shared - seq.num_computed_tokens
                # The extent of a pass in progress is not reduced any more.
                first = max(ahead.num_computed_tokens + 1, ahead.pass_end)
                if shared >= first and saved >= WORTHWHILE_TOKENS:
                    stops = self._stops[ahead]
                    if not any(shared - WORTHWHILE_TOKENS < stop <= shared for stop in stops):
                        stops.append(shared)
                    waiting.add(seq)
                    break
        going_on = [seq for seq in prefilling if seq not in waiting]
        return {seq: min(self._stops[seq], default=seq.prefill_end) for seq in going_on}

    def after_chunk(self, seq: Sequence, builder: PlanBuilder) -> None:
        """Take a snapshot after a chunk of this plan, if one is due there."""
        if not self._config.reuses_states:
            return
        position = seq.num_computed_tokens
        is_far = position - seq.snapshots.newest_position >= _interval(seq.prefill_end)
        if is_far or position in self._stops.get(seq, ()):
            self._save(seq, builder)

    def after_decode(self, seq: Sequence, builder: PlanBuilder) -> None:
        """Replace the trailing snapshot at a block boundary. The tokens up to there may not be
        known yet, and most of these snapshots are not needed: `publish_trailing` sets its hash."""
        if seq.num_computed_tokens % self._state_tokens or not self._config.reuses_states:
            return
        old = seq.snapshots.trailing
        if old is not None and self._memory.snapshots.holds(old):
            if old.pins:
                return
            self._memory.drop_snapshot(old)
        seq.snapshots.trailing = self._memory.add_snapshot(None)
        if seq.snapshots.trailing is not None:
            seq.snapshots.trailing_position = seq.num_computed_tokens
            builder.save_state(seq, seq.snapshots.trailing)

    def touch_trailing(self, seq: Sequence) -> None:
        """Mark the trailing snapshot as used: ``seq`` will restore it."""
        if seq.snapshots.trailing is not None:
            self._memory.snapshots.touch(seq.snapshots.trailing.hash)

    def publish_trailing(self, seq: Sequence) -> None:
        """Publish the trailing snapshot, once ``seq`` no longer decodes and its tokens are
        known."""
        pool, hashes = self._memory.snapshots, seq.block_hashes
        snapshot, seq.snapshots.trailing = seq.snapshots.trailing, None
        if snapshot is None or not pool.holds(snapshot):
            return
        number = seq.snapshots.trailing_position // self._block_size
        if number > len(hashes) or not pool.publish(snapshot, hashes[number - 1]):
            self._memory.drop_snapshot(snapshot)
        elif self._config.writes_through:
            self._memory.backlog.add([snapshot])

    def is_worth_saving(self, seq: Sequence) -> bool:
        """Return whether ``seq``, which must leave its slot, has state worth a snapshot."""
        position = seq.num_computed_tokens
        fits = position % self._state_tokens == 0 and position <= len(seq.token_ids)
        fits = fits and not seq.num_inflight_drafts  # the state may be one after some of them
        is_far = position - seq.snapshots.newest_position >= WORTHWHILE_TOKENS
        return fits and is_far and self._config.reuses_states

    def before_leaving(self, seq: Sequence, builder: PlanBuilder) -> None:
        if self.is_worth_saving(seq):
            self._save(seq, builder)

    def restorable_end(self, seq: Sequence, first: int, end: int) -> int:
        """Return the last block number, above ``first`` and up to ``end``, from which ``seq``
        can continue: with recurrent state, one that has a snapshot. ``first`` if there is none."""
        if not self._config.reuses_states:
            return end
        return self._memory.snapshots.longest_prefix(seq.block_hashes, first, end)

    def search(self, seq: Sequence, usable: int, cached: int, end: int) -> StateSearch | None:
        """Return the range of positions whose state to fetch for ``seq`` from the kvstore: after
        more than ``usable`` blocks and at most ``end``, of which ``cached`` are in RAM. None if
        no state is needed."""
        if not self._config.reuses_states:
            return None
        step = self._state_tokens // self._block_size
        hashes = seq.block_hashes[usable + step - 1 : end : step]
        ready = (cached - usable) // step
        in_ram = (
            number
            for number, block_hash in enumerate(hashes, 1)
            if number > ready and block_hash in self._memory.snapshots
        )
        return StateSearch(hashes, ready, tuple(in_ram))

    def touch_prefix(self, seq: Sequence, end: int) -> None:
        """Mark the snapshot that ``seq`` will start from as used."""
        if self._config.reuses_states and (number := self.restorable_end(seq, 0, end)):
            self._memory.snapshots.touch(seq.block_hashes[number - 1])

    def pin(self, seq: Sequence, number: int) -> Snapshot | None:
        """Pin the snapshot after ``number`` blocks, so that room for pages does not cost it."""
        snapshot = self._memory.snapshots.get(seq.block_hashes[number - 1]) if number else None
        if snapshot is not None:
            self._memory.snapshots.pin(snapshot)
        return snapshot

    def _positions_ahead(self, seq: Sequence) -> list[int]:
        """Return the positions of upcoming snapshots that justify cutting a chunk. The one at
        the end of its prompt justifies more, because the next turn is the most likely use."""
        *partings, end = seq.snapshots.prompt_positions
        newest = seq.snapshots.newest_position
        positions = [position for position in partings if position - newest >= WORTHWHILE_TOKENS]
        if end - newest >= 2 * self._block_size:
            positions.append(end)
        return [position for position in positions if position > seq.num_computed_tokens]

    def _save(self, seq: Sequence, builder: PlanBuilder) -> None:
        number = seq.num_computed_tokens // self._block_size
        is_between = seq.num_computed_tokens % self._state_tokens > 0
        if is_between or not 0 < number <= len(seq.block_hashes):
            return
        seq.snapshots.newest_position = seq.num_computed_tokens
        block_hash = seq.block_hashes[number - 1]
        if block_hash in self._memory.snapshots:
            self._memory.snapshots.touch(block_hash)
            return
        snapshot = self._memory.add_snapshot(block_hash)
        if snapshot is not None:
            builder.save_state(seq, snapshot)
            if self._config.writes_through:
                self._memory.backlog.add([snapshot])

    def _shared_tokens(self, ahead: Sequence, seq: Sequence) -> int:
        """Return how many tokens, in full blocks, ``ahead`` will have computed that ``seq`` needs;
        0 if they differ already in the next block of ``seq``."""
        low = seq.num_computed_tokens // self._block_size
        tokens = min(seq.num_restorable_tokens, ahead.prefill_end)
        high = min(len(seq.block_hashes), tokens // self._block_size)
        if low >= high or seq.block_hashes[low] != ahead.block_hashes[low]:
            return 0
        while high - low > 1:
            middle = (low + high) // 2
            if seq.block_hashes[middle] == ahead.block_hashes[middle]:
                low = middle
            else:
                high = middle
        return self._round_down(high * self._block_size)

    def _round_down(self, tokens: int) -> int:
        """Return the last position up to ``tokens`` at which snapshots are taken."""
        return tokens // self._state_tokens * self._state_tokens

    def _count_seen(self, hashes: SequenceOf[bytes]) -> int:
        """Return how many of ``hashes``, from the first without a gap, were seen in prompts."""
        for number, block_hash in enumerate(hashes):
            if block_hash not in self._seen:
                return number
        return len(hashes)

    def _remember(self, hashes: SequenceOf[bytes]) -> None:
        """Remember ``hashes``, heads last: a chain is useless without its head."""
        for block_hash in reversed(hashes):
            self._seen[block_hash] = None
            self._seen.move_to_end(block_hash)
        while len(self._seen) > MAX_SEEN_BLOCKS:
            self._seen.popitem(last=False)


def _interval(length: int) -> int:
    """Return the distance of snapshots inside a prompt of ``length`` tokens."""
    interval = SNAPSHOT_INTERVAL_TOKENS
    while length > MAX_INNER_SNAPSHOTS * interval:
        interval *= 2
    return interval
