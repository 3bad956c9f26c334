"""The decisions of one step, in their order."""

from __future__ import annotations

from collections.abc import Callable

from engine.plan import Chunk, Decode, Insert, Move
from engine.scheduler.backoff import ConcurrencyBackoff
from engine.scheduler.block_pool import Block
from engine.scheduler.chunks import ChunkPolicy
from engine.scheduler.config import SchedulerConfig
from engine.scheduler.memory import Memory
from engine.scheduler.outputs import Counters, Outputs
from engine.scheduler.plan_builder import PlanBuilder
from engine.scheduler.sequence import HOLDING_SLOT, Sequence, Status
from engine.scheduler.sequence_table import SequenceTable
from engine.scheduler.snapshot_policy import SnapshotPolicy
from shared import wire

LOGPROBS_CHUNK_TOKENS = 128
"""The longest chunk whose log-probabilities are wanted: they take logits of every position."""


class Planner:
    """Fills builders. What it decides takes effect at once in sequence table and memory, which
    thereby show the state after every plan made so far."""

    def __init__(
        self,
        config: SchedulerConfig,
        sequences: SequenceTable,
        memory: Memory,
        snapshot_policy: SnapshotPolicy,
        chunk_policy: ChunkPolicy,
        outputs: Outputs,
        counters: Counters,
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._sequences = sequences
        self._memory = memory
        self._snapshot_policy = snapshot_policy
        self._chunk_policy = chunk_policy
        self._outputs = outputs
        self._counters = counters
        self._clock = clock
        self._next_ticket = 0
        self.backoff = ConcurrencyBackoff(config.completion_batch_size)

    def fill(self, builder: PlanBuilder) -> None:
        self._free_slots(builder)
        has_room = self._grow(builder)
        if has_room:
            self._admit(builder)
        self._rematch(builder)
        self._decode(builder)
        self._prefill(builder)
        if has_room:
            self._save_computed(builder)
        self._release_leaving(builder)

    def _free_slots(self, builder: PlanBuilder) -> None:
        """Slots that no plan from here on uses. Finished sequences with blocks to save
        keep theirs for this one."""
        remaining = []
        for seq in self._sequences.leaving:
            unsaved = seq.num_saved_blocks < seq.num_savable_blocks and self._config.reuses_kv
            if unsaved or self._snapshot_policy.is_worth_saving(seq):
                remaining.append(seq)
            else:
                self._sequences.vacate(seq)
        self._sequences.leaving = remaining
        for slot in self._sequences.vacated:
            self._memory.slots.release(slot)
            builder.changed = True
        self._sequences.vacated.clear()

    def _grow(self, builder: PlanBuilder) -> bool:
        """Moves rows that are full to larger slots. False when one found no room: then
        nobody may join and nothing is cached before it has got some."""
        has_room = True
        for seq in self._sequences.ordered(Status.DECODING):
            # A Move would lose the token that only the device knows: wait for it.
            if (
                seq.num_computed_tokens < seq.capacity
                or seq.num_inflight
                or seq.status is not Status.DECODING
            ):
                continue
            grown = self._memory.allocate_slot(self._wanted_tokens(seq))
            if grown is not None:
                source = seq.held_slot
                builder.moves.append(Move(source, grown[0], seq.num_computed_tokens))
                self._sequences.vacate(seq)
                seq.slot, seq.capacity = grown
                seq.stalled = False
                continue
            has_room = False
            builder.changed = True
            room_is_coming = (
                self._sequences.leaving
                or self._sequences.count(Status.ENDING)
                or self._memory.blocks.num_evictable < len(self._memory.blocks)
            )
            if seq.stalled and not room_is_coming:
                seq.stalled = False
                self._preempt(self._sequences.ordered(*HOLDING_SLOT)[-1], builder)
            else:
                seq.stalled = True
        return has_room

    def _preempt(self, seq: Sequence, builder: PlanBuilder) -> None:
        self._sequences.preempt(seq)
        if self._config.prefix_cache:
            seq.update_block_hashes()
        seq.num_saved_blocks = self._memory.blocks.touch(seq.block_hashes[: seq.num_savable_blocks])
        self._snapshot_policy.touch_trailing(seq)
        builder.preempted.append(seq)
        self._counters.preemptions += 1

    def _wanted_tokens(self, seq: Sequence) -> int:
        """What is there, and some more, so that it need not move soon."""
        return min(seq.max_positions, len(seq.token_ids) + self._memory.smallest_capacity // 4)

    # -- joining -------------------------------------------------------------------

    def _admit(self, builder: PlanBuilder) -> None:
        """Gives slots to those that wait, strictly in order: whom there is no room for
        is not overtaken, or a large request would wait for ever."""
        while self._sequences.num_running < self.backoff.limit:
            seq = self._sequences.waiting.peek()
            if seq is None or seq.num_inflight:
                return
            cached = 0
            reusable = seq.num_restorable_tokens // self._config.block_size
            if self._config.prefix_cache:
                seq.update_block_hashes()
                self._snapshot_policy.publish_trailing(seq)
                cached = self._memory.blocks.match_prefix(seq.block_hashes[:reusable])
                if self._request_fetch(seq, cached, reusable):
                    builder.changed = True
                    continue
                # Used just now: what must go to make room should be something else.
                self._snapshot_policy.touch_prefix(
                    seq, cached if self._config.keeps_kv else reusable
                )
                self._memory.blocks.touch(seq.block_hashes[:cached])
            acquired = self._memory.allocate_slot(self._wanted_tokens(seq))
            if acquired is None:
                return
            self._sequences.waiting.pop()
            seq.begin(*acquired, self._clock())
            self._sequences.set_status(seq, Status.PREFILLING)
            self._restore(seq, builder)
            self._snapshot_policy.choose_positions(seq)
            seq.fetched_payloads.clear()
            self._memory.release_fetch(seq)

    def _request_fetch(self, seq: Sequence, cached: int, reusable: int) -> bool:
        """Sends ``seq``, at the head of the queue, to wait for the kvstore, where that
        might have what memory has not."""
        if not self._config.uses_store or seq.fetch_requested or cached == reusable:
            return False
        if len(self._sequences.loading) >= self._config.completion_batch_size:
            return False
        self._memory.blocks.touch(seq.block_hashes[:cached])
        room = self._memory.reserve_fetch(seq, reusable - cached)
        if not room:
            return False
        self._sequences.waiting.pop()
        seq.fetch_requested, seq.fetch_first_block = True, cached
        self._outputs.fetches.append((self._next_ticket, seq.block_hashes[cached : cached + room]))
        self._sequences.start_loading(seq, self._next_ticket)
        self._next_ticket += 1
        return True

    def _rematch(self, builder: PlanBuilder) -> None:
        """Others may have published what a prefilling sequence needs next."""
        for seq in self._sequences.ordered(Status.PREFILLING):
            if self._config.prefix_cache and seq.num_computed_tokens < seq.prefill_end:
                self._restore(seq, builder)
            if seq.num_computed_tokens == seq.prefill_end:
                self._sequences.set_status(seq, Status.READY)

    def _restore(self, seq: Sequence, builder: PlanBuilder) -> None:
        """Copies the cached blocks that follow what ``seq`` has, if there are any; where the
        model has state, up to the last snapshot of it."""
        size = self._config.block_size
        first = seq.num_computed_tokens // size
        end = self._snapshot_policy.restorable_end(
            seq, first, min(seq.num_restorable_tokens // size, len(seq.block_hashes))
        )
        known = len(builder.inserts)
        blocks = self._pin_blocks(seq, first, end, builder) if self._config.keeps_kv else []
        if self._config.keeps_kv:
            end = self._snapshot_policy.restorable_end(seq, first, first + len(blocks))
        builder.keep_pinned(seq, blocks[end - first :])
        if end == first:
            return
        new = {insert.block_id for insert in builder.inserts[known:]}
        inserted = sum(block.id in new for block in blocks[: end - first])
        if blocks:
            builder.restore(seq, blocks[: end - first])
        self._snapshot_policy.restore(seq, end, builder)
        ram, ssd = seq.count_cached_tokens((end - first - inserted) * size, inserted * size)
        self._counters.cached_ram_tokens += ram
        self._counters.cached_ssd_tokens += ssd
        if self._config.uses_store:
            self._outputs.touches.extend(seq.block_hashes[first:end])
        seq.num_computed_tokens = seq.last_snapshot_position = end * size
        seq.num_saved_blocks = end
        seq.max_computed_tokens = max(seq.max_computed_tokens, seq.num_computed_tokens)

    def _pin_blocks(self, seq: Sequence, first: int, end: int, builder: PlanBuilder) -> list[Block]:
        """The blocks of ``seq`` from number ``first`` to ``end``, as far as they are there
        without a gap, pinned. What came from the kvstore is inserted."""
        blocks: list[Block] = []
        for number in range(first, end):
            block = self._memory.blocks.get(seq.block_hashes[number])
            if block is not None:
                self._memory.blocks.pin(block)
            elif number in seq.fetched_payloads:
                block = self._memory.add_fetched_block(seq.block_hashes[number], seq)
                if block is None:
                    break
                builder.inserts.append(Insert(block.id, seq.fetched_payloads[number]))
            else:
                break
            blocks.append(block)
        return blocks

    # -- computing -----------------------------------------------------------------

    def _decode(self, builder: PlanBuilder) -> None:
        for seq in self._sequences.ordered(Status.READY):
            if self._sequences.count(Status.DECODING) >= self._config.max_batch_size:
                break
            self._sequences.set_status(seq, Status.DECODING)
        rows = [
            seq
            for seq in self._sequences.ordered(Status.DECODING)
            if seq.num_computed_tokens < seq.capacity
        ]
        for seq in sorted(rows, key=lambda seq: seq.held_slot):
            request = seq.request
            index = seq.num_computed_tokens + 1 - seq.num_prompt_tokens
            history = self._history(seq)
            builder.decode(
                seq,
                Decode(
                    slot=seq.held_slot,
                    position=seq.num_computed_tokens,
                    token_id=None if seq.num_inflight else seq.token_ids[seq.num_computed_tokens],
                    output_index=index,
                    sampling=request.sampling,
                    forbidden=self._forbidden(request, index),
                    logprobs=request.logprobs,
                    history=history,
                    constrained=request.grammar is not None,
                    grammar=None if history is None else request.grammar,
                ),
            )
            seq.num_computed_tokens += 1
            seq.num_inflight += 1
            seq.max_computed_tokens = max(seq.max_computed_tokens, seq.num_computed_tokens)
            if seq.all_outputs_planned:
                self._sequences.set_status(seq, Status.ENDING)

    def _forbidden(self, request: wire.Submit, index: int) -> tuple[int, ...]:
        early = index < request.min_tokens
        tokens = set(request.stop_token_ids) if early else set()
        if request.grammar is not None:
            # These end it, wanted or not: so they come only where nothing else may.
            ends = self._config.eos_token_ids
            tokens.update(ends if early else set(ends) - set(request.stop_token_ids))
        return tuple(sorted(tokens))

    def _history(self, seq: Sequence) -> tuple[int, ...] | None:
        request = seq.request
        if seq.history_sent or not (request.sampling.looks_back or request.grammar is not None):
            return None
        seq.history_sent = True
        return tuple(seq.token_ids[: seq.num_computed_tokens])

    def _prefill(self, builder: PlanBuilder) -> None:
        """The oldest get the budget first, so that they start one after the other."""
        budget = self._chunk_policy.budget(streaming=bool(builder.decodes))
        size = self._config.block_size
        claimed: set[bytes] = set()
        prefilling = self._sequences.ordered(Status.PREFILLING)
        limits = self._snapshot_policy.prefill_limits(prefilling)
        for seq in prefilling:
            if len(builder.chunks) == self._config.prefill_batch_size:
                break
            # Somebody ahead computes this very block now; at the next step it is there.
            number = seq.num_computed_tokens // size
            # (Who wants to know how likely its tokens are has to compute it by itself.)
            if (
                not seq.needs_prompt_logprobs
                and number < len(seq.block_hashes)
                and seq.block_hashes[number] in claimed
            ):
                continue
            if seq not in limits:
                continue
            remaining = limits[seq] - seq.num_computed_tokens
            if seq.needs_prompt_logprobs:
                remaining = min(remaining, max(LOGPROBS_CHUNK_TOKENS // size, 1) * size)
            tokens = budget.take(seq.num_computed_tokens, remaining)
            if not tokens:
                continue
            end = seq.num_computed_tokens + tokens
            builder.chunk(seq, self._chunk(seq, end))
            if not self._config.reuses_states:
                claimed.update(seq.block_hashes[number : end // size])
            seq.num_computed_tokens = end
            seq.max_computed_tokens = max(seq.max_computed_tokens, end)
            if end == seq.prefill_end:
                self._sequences.set_status(seq, Status.READY)

    def _chunk(self, seq: Sequence, end: int) -> Chunk:
        start = seq.num_computed_tokens
        token_ids = tuple(seq.token_ids[start:end])
        if not seq.needs_prompt_logprobs:
            return Chunk(seq.held_slot, start, token_ids)
        target_ids = tuple(seq.request.token_ids[start + 1 : end + 1])
        return Chunk(seq.held_slot, start, token_ids, target_ids, seq.request.prompt_logprobs or 0)

    # -- leaving -------------------------------------------------------------------

    def _save_computed(self, builder: PlanBuilder) -> None:
        """Saves what is full, at the very end: nothing in this plan may restore from it."""
        for seq, _, _ in builder.step.chunks:
            self._save_full_blocks(seq, builder)
            self._snapshot_policy.after_chunk(seq, builder)
        for seq in builder.step.decodes:
            self._save_full_blocks(seq, builder)
            self._snapshot_policy.after_decode(seq, builder)

    def _release_leaving(self, builder: PlanBuilder) -> None:
        """The last plan for those who give up their slots: what they computed stays."""
        for seq in self._sequences.leaving:
            self._save_full_blocks(seq, builder)
            self._snapshot_policy.before_leaving(seq, builder)
            self._sequences.vacate(seq)
            builder.changed = True
        self._sequences.leaving = []
        for seq in builder.preempted:
            self._save_full_blocks(seq, builder)
            self._snapshot_policy.before_leaving(seq, builder)
            self._sequences.vacate(seq)
            seq.reset()
            self._sequences.enqueue(seq, Status.PREEMPTED)

    def _save_full_blocks(self, seq: Sequence, builder: PlanBuilder) -> None:
        """Saves the full blocks that the pool lacks, as far as there is room."""
        if not self._config.prefix_cache:
            return
        seq.update_block_hashes()
        if not self._config.keeps_kv:
            return
        export = self._config.uses_store and self._config.store_policy == "write_through"
        run: list[Block] = []
        while seq.num_saved_blocks < seq.num_savable_blocks:
            block = None
            if seq.block_hashes[seq.num_saved_blocks] not in self._memory.blocks:
                block = self._memory.add_block(seq.block_hashes[seq.num_saved_blocks])
                if block is None:
                    break
                run.append(block)
            elif run:
                builder.save(seq, seq.num_saved_blocks - len(run), run, export=export)
                run = []
            seq.num_saved_blocks += 1
        if run:
            builder.save(seq, seq.num_saved_blocks - len(run), run, export=export)
