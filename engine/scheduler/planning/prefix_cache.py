"""Prefix reuse: cached blocks are copied into slots, and full blocks of slots into the cache. Parts
of a running sequence's prefix beyond its last full block are copied from slot to slot."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from engine.scheduler.config import SchedulerConfig
from engine.scheduler.memory import Memory
from engine.scheduler.outputs import Counters, Outputs
from engine.scheduler.planning.pictures import WholePictures
from engine.scheduler.planning.plan_builder import PlanBuilder
from engine.scheduler.planning.snapshot_policy import SnapshotPolicy
from engine.scheduler.pools.block_pool import Block
from engine.scheduler.sequences.sequence import Sequence, Status
from engine.scheduler.sequences.sequence_table import SequenceTable

ALONE_RESTORED = 8
"""While no sequence decodes, a plan restores this many times as many blocks as beside streams:
only newcomers wait for it."""
MIN_COPIED = 4
"""Fewer positions than this are computed instead of copied."""


class PrefixCache:
    """Restores and saves blocks, and the snapshots without which blocks may be useless."""

    def __init__(
        self,
        config: SchedulerConfig,
        sequences: SequenceTable,
        memory: Memory,
        outputs: Outputs,
        counters: Counters,
    ) -> None:
        self._config = config
        self._sequences = sequences
        self._memory = memory
        self._outputs = outputs
        self._counters = counters
        self._max_inserts = max(1, config.max_insert_bytes // config.block_bytes)
        ends_anywhere = not (config.reuses_states or config.whole_picture_tokens)
        self._max_restored = config.max_restored_blocks if ends_anywhere else None
        self.snapshot_policy = SnapshotPolicy(config, memory)
        self._whole_pictures = WholePictures(config)

    def restore(self, seq: Sequence, builder: PlanBuilder) -> None:
        """Copy cached blocks into the slot of ``seq``, starting where its computed part ends. If
        the model has recurrent state, they end at the last snapshot among them.

        The blocks fetched from the kvstore are inserted first, as many as a plan may insert and
        restore. If more are left, ``seq`` is restoring (`Sequence.is_restoring`): call this again
        for the next plan."""
        size = self._config.block_size
        first = seq.num_computed_tokens // size
        end = min(seq.num_restorable_tokens // size, len(seq.block_hashes))
        fetched_end = self._insert_fetched_state(seq, first, end, builder)
        end = self.snapshot_policy.restorable_end(seq, first, end)
        blocks = self._pin_blocks(seq, first, end if self._config.keeps_kv else first, builder)
        if self._config.keeps_kv:
            end = self.snapshot_policy.restorable_end(seq, first, first + len(blocks))
            end = max(first, self._whole_pictures.restorable_blocks(seq, end))
        builder.keep_pinned(seq, blocks[end - first :])
        if end == first:
            return
        seq.num_computed_tokens = first * size  # a whole block is better than a copied part
        inserted = sum(number in seq.fetch.inserted for number in range(first, end))
        if end == fetched_end and not self._config.keeps_kv:
            inserted = end - first
        if blocks:
            builder.restore(seq, blocks[: end - first])
        self.snapshot_policy.restore(seq, end, builder)
        ram, ssd = seq.count_cached_tokens((end - first - inserted) * size, inserted * size)
        self._counters.cached_ram_tokens += ram
        self._counters.cached_ssd_tokens += ssd
        if self._config.uses_store:
            if self._config.keeps_kv:
                self._outputs.touches.append(seq.block_hashes[first:end])
            if self._config.reuses_states:
                self._outputs.state_touches.append(seq.block_hashes[end - 1])
        seq.advance(end * size)
        seq.snapshots.newest_position = end * size
        seq.num_saved_blocks = end

    def copy_running(self, seq: Sequence, builder: PlanBuilder, *statuses: Status) -> None:
        """Copy the positions after the last block of ``seq`` from a sequence with the same
        tokens there and one of ``statuses``, if there is one: its prompt must be computed.
        Sequences that start with the same new prefix then compute only the tokens they do not
        share."""
        start = seq.num_computed_tokens
        number, rest = divmod(start, self._config.block_size)
        if not self._config.copies_positions or rest or not number:
            return
        if seq.needs_prompt_logprobs or seq.pictures:
            return
        before = slice(number - 1, number)
        end, best = start + MIN_COPIED - 1, None
        for source in self._sequences.ordered(*statuses):
            if source.pictures or source.block_hashes[before] != seq.block_hashes[before]:
                continue
            last = min(start + self._config.block_size, seq.prefill_end, source.prefill_end)
            last = min(last, source.num_computed_tokens)  # its end may not be computed yet
            common = _count_common(seq.token_ids[start:last], source.token_ids[start:last])
            if start + common > end:
                end, best = start + common, source
        if best is not None:
            builder.copy(seq, best, end)
            self._counters.cached_ram_tokens += sum(seq.count_cached_tokens(end - start, 0))
            seq.advance(end)

    def touch_computed(self, seq: Sequence) -> None:
        """Mark the cached blocks of the computed part of ``seq`` as recently used, its head last
        of all."""
        if self._config.prefix_cache:
            seq.update_block_hashes()
        seq.num_saved_blocks = self._memory.blocks.touch(seq.block_hashes[: seq.num_savable_blocks])

    def save_full_blocks(self, seq: Sequence, builder: PlanBuilder) -> None:
        """Save the full blocks of ``seq`` that are missing from the pool, as far as there is
        room and its slot still has them: layers with a window keep only the window."""
        if not self._config.prefix_cache:
            return
        seq.update_block_hashes()
        if not self._config.keeps_kv:
            return
        first_kept = seq.last_pass_start - (self._config.window_tokens or seq.last_pass_start)
        run: list[Block] = []
        while seq.num_saved_blocks < seq.num_savable_blocks:
            if seq.block_hashes[seq.num_saved_blocks] not in self._memory.blocks:
                if seq.num_saved_blocks * self._config.block_size < first_kept:
                    break
                block = self._memory.add_block(seq.block_hashes[seq.num_saved_blocks])
                if block is None:
                    break
                run.append(block)
            elif run:
                self._save(seq, run, builder)
                run = []
            seq.num_saved_blocks += 1
        if run:
            self._save(seq, run, builder)

    def _save(self, seq: Sequence, run: list[Block], builder: PlanBuilder) -> None:
        """Save the blocks ``run`` of ``seq``, which end where its saved ones do."""
        builder.save(seq, seq.num_saved_blocks - len(run), run)
        if self._config.writes_through:
            self._memory.backlog.add(run)

    def _insert_fetched_state(
        self, seq: Sequence, first: int, end: int, builder: PlanBuilder
    ) -> int:
        """Insert the state that the kvstore returned for ``seq``, if it makes more blocks usable
        than the snapshots in RAM. Return the number of blocks before it, 0 if it was not
        inserted."""
        number, payload = seq.fetch.state_end, seq.fetch.state
        reach = self._count_available(seq, first, end)
        if payload is None or not first < number <= reach:
            return 0
        if self.snapshot_policy.restorable_end(seq, first, reach) >= number:
            return 0
        snapshot = self._memory.add_fetched_snapshot(seq.block_hashes[number - 1], seq)
        seq.fetch.state = None
        if snapshot is None:
            return 0
        builder.insert(snapshot, payload)
        builder.keep_pinned(seq, [snapshot])
        return number

    def _count_available(self, seq: Sequence, first: int, end: int) -> int:
        """Return the block number up to which blocks, from ``first`` on without a gap, are
        cached or were fetched from the kvstore."""
        if not self._config.keeps_kv:
            return end
        for number in range(first, end):
            in_ram = seq.block_hashes[number] in self._memory.blocks
            if not in_ram and number not in seq.fetch.payloads:
                return number
        return end

    def _pin_blocks(self, seq: Sequence, first: int, end: int, builder: PlanBuilder) -> list[Block]:
        """Return the blocks of ``seq`` from ``first`` to ``end``, pinned, up to the first gap.
        Blocks that came from the kvstore are inserted. If the plan has no room for more, the rest
        is left for later plans; otherwise what is left of the fetch is dropped."""
        blocks: list[Block] = []
        room = self._max_restored
        if room is not None and not self._sequences.count(Status.DECODING):
            room *= ALONE_RESTORED
        seq.fetch.has_more_cached = False
        for number in range(first, end):
            block = self._memory.blocks.get(seq.block_hashes[number])
            if room is not None and builder.num_restored + len(blocks) >= room:
                seq.fetch.has_more_cached = block is not None
                if seq.is_restoring:
                    return blocks
                break
            if block is not None:
                self._memory.blocks.pin(block)
                self._memory.drop_fetched(seq, number)
            elif number in seq.fetch.payloads:
                if len(builder.inserts) >= self._max_inserts:
                    return blocks
                payload = seq.fetch.payloads.pop(number)
                block = self._memory.add_fetched_block(seq.block_hashes[number], seq)
                if block is None:
                    break
                builder.insert(block, payload)
                seq.fetch.inserted.add(number)
            else:
                break
            blocks.append(block)
        self._memory.drop_fetch(seq)
        return blocks


def _count_common(one: SequenceOf[int], other: SequenceOf[int]) -> int:
    """Return the length of the common prefix of ``one`` and ``other``."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))
