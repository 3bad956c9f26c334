"""The decisions of one step, in order."""

from __future__ import annotations

from collections.abc import Callable

from engine.plan import Decode, Move
from engine.scheduler.config import SchedulerConfig
from engine.scheduler.memory import Memory
from engine.scheduler.outputs import Counters, Fetch, Outputs
from engine.scheduler.planning.axes import position_shift
from engine.scheduler.planning.drafting import Drafting
from engine.scheduler.planning.plan_builder import PlanBuilder
from engine.scheduler.planning.prefilling import Prefilling
from engine.scheduler.planning.prefix_cache import PrefixCache
from engine.scheduler.sequences.sequence import HOLDING_SLOT, Sequence, Status
from engine.scheduler.sequences.sequence_table import SequenceTable
from engine.scheduler.timing.backoff import AdmissionRetry, ConcurrencyBackoff
from engine.scheduler.timing.time_share import TimeShare
from shared import wire

Clock = Callable[[], float]


class Planner:
    """Fills plan builders. Its decisions take effect immediately in the sequence table and in
    memory, which therefore show the state after every plan made so far."""

    def __init__(
        self,
        config: SchedulerConfig,
        sequences: SequenceTable,
        memory: Memory,
        prefix_cache: PrefixCache,
        prefilling: Prefilling,
        time_share: TimeShare,
        drafting: Drafting,
        outputs: Outputs,
        counters: Counters,
        clock: Clock,
    ) -> None:
        self._config = config
        self._sequences = sequences
        self._memory = memory
        self._prefix_cache = prefix_cache
        self._snapshot_policy = prefix_cache.snapshot_policy
        self.prefilling = prefilling
        self._time_share = time_share
        self._drafting = drafting
        self._outputs = outputs
        self._counters = counters
        self._clock = clock
        self._next_ticket = 0
        self._let_pass = False
        """Whether prompts were due in the last plan, but waited for a sequence's first token."""
        self.backoff = ConcurrencyBackoff(config.completion_batch_size)
        self._retry = AdmissionRetry()

    def fill(self, builder: PlanBuilder) -> None:
        """Decide one step, and add its operations to ``builder``."""
        self.prefilling.passes.drop_abandoned()
        self.prefilling.pictures.drop_abandoned(self._sequences.ordered(Status.PREFILLING))
        self._free_slots(builder)
        has_room = self._grow(builder)
        if has_room:
            self._admit(builder)
        self._rematch(builder)
        self._compute(builder)
        if has_room:
            self._save_computed(builder)
        self._release_leaving(builder)
        builder.dropped_passes += self.prefilling.passes.take_dropped()
        builder.dropped_pictures += self.prefilling.pictures.take_dropped()
        builder.export(self._memory.backlog.take())

    def _free_slots(self, builder: PlanBuilder) -> None:
        """Free the slots that no later plan uses. Finished sequences with unsaved blocks keep
        theirs for this plan."""
        remaining = []
        for seq in self._sequences.leaving:
            if self.prefilling.passes.of(seq) is not None:
                remaining.append(seq)  # the other sequences in the pass continue
                continue
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
        builder.freed_slots += self._sequences.forgettable
        self._sequences.forgettable.clear()

    def _grow(self, builder: PlanBuilder) -> bool:
        """Move full rows to larger slots. Return False if one found no room. Until there is
        room, no sequence joins and nothing is cached."""
        has_room = True
        for seq in self._sequences.ordered(Status.DECODING):
            # A Move would lose the token that only the device has: wait for it.
            is_full = seq.num_computed_tokens >= seq.capacity
            if not is_full or seq.num_inflight or seq.status is not Status.DECODING:
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
                or builder.preempted
                or self._sequences.count(Status.ENDING)
                or self._memory.blocks.num_evictable < len(self._memory.blocks)
            )
            if seq.stalled and not room_is_coming:
                seq.stalled = False
                self.preempt(self._sequences.ordered(*HOLDING_SLOT)[-1], builder)
            else:
                seq.stalled = True
        return has_room

    def preempt(self, seq: Sequence, builder: PlanBuilder) -> None:
        """Take the slot of ``seq`` away after this plan has saved what it computed."""
        self.prefilling.passes.drop(seq)
        self._sequences.preempt(seq)
        self._prefix_cache.touch_computed(seq)
        self._snapshot_policy.touch_trailing(seq)
        builder.preempted.append(seq)
        self._counters.preemptions += 1

    def _wanted_tokens(self, seq: Sequence) -> int:
        """Return the length of ``seq`` plus a margin, so that it does not have to move soon."""
        return min(seq.max_positions, len(seq.token_ids) + self._memory.smallest_capacity // 4)

    # -- joining -------------------------------------------------------------------

    def _admit(self, builder: PlanBuilder) -> None:
        """Admit waiting sequences in order. A sequence that does not fit blocks those behind it;
        otherwise a large request would starve."""
        while True:
            seq = self._sequences.waiting.peek()
            if seq is None or seq.num_inflight:
                return
            used_rows = self._memory.slots.used_rows
            is_full = self._sequences.num_running >= self.backoff.limit
            if is_full or self._retry.skips(seq.request.request_id, used_rows):
                self._make_way(seq, builder)
                return
            cached = 0
            reusable = seq.num_restorable_tokens // self._config.block_size
            if self._config.prefix_cache:
                seq.update_block_hashes()
                self._snapshot_policy.publish_trailing(seq)
                cached = self._memory.blocks.match_prefix(seq.block_hashes[:reusable])
                end = cached if self._config.keeps_kv else reusable
                if self._request_fetch(seq, end, reusable):
                    builder.changed = True
                    continue
                # They are needed now: evict something else to make room.
                self._snapshot_policy.touch_prefix(seq, end)
                self._memory.blocks.touch(seq.block_hashes[:cached])
            acquired = self._memory.allocate_slot(self._wanted_tokens(seq))
            if acquired is None:
                self._retry.refused(seq.request.request_id, used_rows)
                self._make_way(seq, builder)
                return
            self._sequences.waiting.pop()
            seq.begin(*acquired, self._clock())
            self._sequences.set_status(seq, Status.PREFILLING)
            self._prefix_cache.restore(seq, builder)
            self._snapshot_policy.choose_positions(seq)

    def _make_way(self, seq: Sequence, builder: PlanBuilder) -> None:
        """Preempt a background sequence, if there is one, to free a slot for ``seq``. Its blocks
        stay cached, and its slot is free in the next plan."""
        if seq.is_background or builder.preempted:
            return
        running = self._sequences.ordered(Status.PREFILLING, Status.READY, Status.DECODING)
        if running and running[-1].is_background:
            self.preempt(running[-1], builder)
            builder.changed = True

    def _request_fetch(self, seq: Sequence, cached: int, reusable: int) -> bool:
        """Move ``seq`` from the head of the queue to the sequences waiting for the kvstore, if
        that may have blocks or states that are not in memory. Return whether it was moved."""
        if not self._config.uses_store or seq.fetch.requested:
            return False
        usable = self._snapshot_policy.restorable_end(seq, 0, cached)
        if usable == reusable or len(self._sequences.loading) >= self._config.completion_batch_size:
            return False
        self._memory.blocks.touch(seq.block_hashes[:cached])
        room = self._memory.reserve_fetch(seq, reusable - cached)
        if room is None:
            return False
        self._sequences.waiting.pop()
        seq.fetch.requested, seq.fetch.first_block = True, cached
        seq.fetch.first_state = usable
        self._outputs.fetches.append(
            Fetch(
                self._next_ticket,
                seq.block_hashes[cached : cached + room],
                self._snapshot_policy.search(seq, usable, cached, cached + room),
                seq.fetch.cancellation,
            )
        )
        self._sequences.start_loading(seq, self._next_ticket)
        self._next_ticket += 1
        return True

    def _rematch(self, builder: PlanBuilder) -> None:
        """Restore blocks that other sequences have cached since, if a prefilling sequence needs
        them next, and copy the rest of a prefix from a running sequence."""
        is_one_ready = self._sequences.count(Status.READY) > 0
        for seq in self._sequences.ordered(Status.PREFILLING):
            if self.prefilling.passes.of(seq) is not None:
                continue
            if self._config.prefix_cache and seq.num_computed_tokens < seq.prefill_end:
                self._prefix_cache.restore(seq, builder)
                if is_one_ready and not seq.is_restoring:
                    self._prefix_cache.copy_running(seq, builder, Status.READY)
            if seq.num_computed_tokens == seq.prefill_end:
                self._sequences.set_status(seq, Status.READY)

    # -- computing -----------------------------------------------------------------

    def _compute(self, builder: PlanBuilder) -> None:
        """Plan decodes, a stretch of a prompt, or both.

        With look-ahead, tokens do not wait for the prompts in their plan. Without it they would,
        so a plan has one or the other."""
        table, streams = self._sequences, (Status.READY, Status.DECODING)
        has_prompts, has_streams = table.has_foreground(Status.PREFILLING), table.count(*streams)
        if has_prompts and has_streams and not table.has_foreground(*streams):
            # Background streams leave all the time to a prompt that a client is waiting for.
            self._time_share.clear()
            if not self.prefilling.join_decode(builder, streaming=False):
                self.prefilling.plan(builder, streaming=False)
            if not builder.has_prompts:
                self._decode(builder)
            return
        streaming = has_streams > 0
        if not (streaming and table.count(Status.PREFILLING)):
            self._time_share.clear()
        self._time_share.of_background = not has_prompts and table.has_foreground(*streams)
        if self._config.look_ahead:
            self._decode(builder)
            if self.prefilling.has_turn or not builder.decodes:
                self.prefilling.plan(builder, streaming=bool(builder.decodes))
            return
        prompts_first = self.prefilling.has_turn and not self._lets_first_token_pass()
        is_decoding = table.count(Status.DECODING) > 0
        if prompts_first or not is_decoding or self.prefilling.owes_nothing:
            joined = self.prefilling.join_decode(builder, streaming=is_decoding)
            prompts_first = prompts_first and not joined
        if not prompts_first:
            self._decode(builder)
        if not builder.decodes:
            self.prefilling.plan(builder, streaming=streaming)
        if prompts_first and not builder.has_prompts:
            self._decode(builder)

    def _lets_first_token_pass(self) -> bool:
        """Return whether prompts wait for a sequence whose prompt is complete, and which gets a
        decode row now.

        They do not wait twice in a row. Otherwise a series of such sequences, most of them
        served from the cache, could starve them."""
        has_row = self._sequences.count(Status.DECODING) < self._config.max_batch_size
        ready = has_row and self._sequences.count(Status.READY) > 0
        self._let_pass = ready and not self._let_pass
        return self._let_pass

    def _decode(self, builder: PlanBuilder) -> None:
        """Plan a decode for every sequence that has a row, after new sequences took the free
        rows."""
        ready = self._sequences.ordered(Status.READY)
        self._take_rows_back(ready)
        for seq in ready:
            if self._sequences.count(Status.DECODING) >= self._config.max_batch_size:
                break
            self._sequences.set_status(seq, Status.DECODING)
            builder.changed |= seq.num_computed_tokens >= seq.capacity  # it needs a larger slot
        decoding = self._sequences.ordered(Status.DECODING)
        rows = [
            seq
            for seq in decoding
            if seq.num_computed_tokens < seq.capacity
            and not _waits_to_end_thinking(seq)
            and not self._drafting.waits(seq, len(decoding))
        ]
        proposals = self._drafting.choose(rows)
        self._drafting.note_waits(builder.step, rows)
        for seq in sorted(rows, key=lambda seq: seq.held_slot):
            proposal = proposals.get(seq)
            drafts = proposal.tokens if proposal else ()
            guesses = self._drafting.guesses_after(seq, len(drafts), len(rows))
            builder.decode(seq, self._make_decode(seq, drafts, guesses), proposal)
            seq.advance(seq.next_position + 1)
            seq.num_inflight += 1
            seq.num_inflight_drafts, seq.awaits_guesses = len(drafts), guesses > 0
            if seq.all_outputs_planned:
                self._sequences.set_status(seq, Status.ENDING)

    def _take_rows_back(self, ready: list[Sequence]) -> None:
        """Take as many rows from background sequences as others of ``ready`` need. They keep
        their slots, and continue once rows are free."""
        missing = sum(not seq.is_background for seq in ready)
        missing -= self._config.max_batch_size - self._sequences.count(Status.DECODING)
        if missing <= 0:
            return
        for seq in reversed(self._sequences.ordered(Status.DECODING)[-missing:]):
            if seq.is_background:
                self._sequences.set_status(seq, Status.READY)

    def _make_decode(self, seq: Sequence, drafts: tuple[int, ...], guesses: int) -> Decode:
        request, position = seq.request, seq.next_position
        index = position + 1 - seq.num_prompt_tokens
        history = self._take_history(seq)
        thinking = seq.follow_thinking()
        return Decode(
            slot=seq.held_slot,
            position=position,
            token_id=None if seq.num_inflight else seq.token_ids[position],
            output_index=index,
            sampling=request.sampling,
            forbidden=self._forbidden(request, index),
            logprobs=request.logprobs,
            history=history,
            constrained=request.grammar is not None,
            grammar=None if history is None else request.grammar,
            forced=thinking.forced() if thinking and not seq.num_inflight else None,
            drafts=drafts,
            guesses=guesses,
            shift=position_shift(seq, position) if seq.pictures else 0,
            adapter=seq.adapter,
            before=tuple(seq.token_ids[seq.num_computed_tokens : position]),
        )

    def _forbidden(self, request: wire.Submit, index: int) -> tuple[int, ...]:
        """Return the tokens that output number ``index`` must not be."""
        early = index < request.min_tokens
        tokens = set(request.stop_token_ids) if early else set()
        if request.grammar is not None:
            # The last resort: these end the output even if the request set no stop token.
            ends = self._config.eos_token_ids
            tokens.update(ends if early else set(ends) - set(request.stop_token_ids))
        return tuple(sorted(tokens))

    def _take_history(self, seq: Sequence) -> tuple[int, ...] | None:
        """Return the tokens that the executor needs with the first decode in a slot, if any."""
        request = seq.request
        if seq.history_sent or not (request.sampling.needs_history or request.grammar is not None):
            return None
        seq.history_sent = True
        return tuple(seq.token_ids[: seq.next_position])

    # -- leaving -------------------------------------------------------------------

    def _save_computed(self, builder: PlanBuilder) -> None:
        """Save what this plan computes. This comes last, because the plan must not restore from
        it."""
        for seq, _, _ in builder.step.completed:
            if seq.status is not Status.FINISHED:
                self._prefix_cache.save_full_blocks(seq, builder)
                self._snapshot_policy.after_chunk(seq, builder)
        for seq in builder.step.decodes:
            self._prefix_cache.save_full_blocks(seq, builder)
            self._snapshot_policy.after_decode(seq, builder)

    def _release_leaving(self, builder: PlanBuilder) -> None:
        """Save what finished and preempted sequences computed, and free their slots."""
        passes = self.prefilling.passes
        staying = [seq for seq in self._sequences.leaving if passes.of(seq) is not None]
        leaving = [seq for seq in self._sequences.leaving if passes.of(seq) is None]
        for seq in (*leaving, *builder.preempted):
            self._prefix_cache.save_full_blocks(seq, builder)
            self._snapshot_policy.before_leaving(seq, builder)
            self._sequences.vacate(seq)
        builder.changed = builder.changed or bool(leaving)
        self._sequences.leaving = staying
        for seq in builder.preempted:
            self._memory.drop_fetch(seq)
            seq.reset()
            self._sequences.enqueue(seq, Status.PREEMPTED)


def _waits_to_end_thinking(seq: Sequence) -> bool:
    """Return whether the token in flight decides if the next one is forced."""
    thinking = seq.follow_thinking() if seq.num_inflight else None
    return thinking is not None and thinking.may_force_after_next()
