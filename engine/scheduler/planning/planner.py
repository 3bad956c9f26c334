"""The decisions of one step, in order."""

from __future__ import annotations

from collections.abc import Callable

from engine.plan import Decode, PartSearch
from engine.scheduler.config import SchedulerConfig
from engine.scheduler.memory import Memory
from engine.scheduler.outputs import Counters, Fetch, Outputs
from engine.scheduler.planning.drafting import Drafting
from engine.scheduler.planning.pictures import position_shift
from engine.scheduler.planning.plan_builder import PlanBuilder
from engine.scheduler.planning.prefilling import Prefilling
from engine.scheduler.planning.prefix_cache import PrefixCache
from engine.scheduler.pools.page_pool import CachedPrefix
from engine.scheduler.sequences.sequence import Sequence, Status
from engine.scheduler.sequences.sequence_table import SequenceTable
from engine.scheduler.timing.backoff import AdmissionRetry, ConcurrencyBackoff
from engine.scheduler.timing.time_share import TimeShare
from shared import wire

Clock = Callable[[], float]

DRAFT_TOKENS = 32
"""Positions for drafts and guesses for which a sequence gets pages ahead, if there are any."""


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
        self._waited_for_first_token = False
        """Whether prompts were due in the last plan, but waited for a sequence's first token."""
        self.backoff = ConcurrencyBackoff(config.completion_batch_size)
        self._retry = AdmissionRetry()

    def fill(self, builder: PlanBuilder) -> None:
        """Decide one step, and add its operations to ``builder``."""
        self.prefilling.passes.drop_abandoned()
        self.prefilling.pictures.drop_abandoned(self._sequences.ordered(Status.PREFILLING))
        self._free_slots(builder)
        self._memory.update_gathers()
        self._make_room_for_prompts(builder)
        self._admit(builder)
        self._rematch(builder)
        self._compute(builder)
        self._finish_plan(builder)
        self._release_leaving(builder)
        builder.dropped_passes += self.prefilling.passes.take_dropped()
        builder.dropped_pictures += self.prefilling.pictures.take_dropped()
        builder.exported += self._memory.backlog.take()

    def _free_slots(self, builder: PlanBuilder) -> None:
        """Free the slots that no later plan uses. Finished sequences whose state is worth saving
        keep theirs for this plan."""
        remaining = []
        for seq in self._sequences.leaving:
            if self.prefilling.passes.of(seq) is not None:
                remaining.append(seq)  # the other sequences in the pass continue
                continue
            self._memory.release(seq)
            if self._snapshot_policy.is_worth_saving(seq):
                remaining.append(seq)
            else:
                self._sequences.vacate(seq)
        self._sequences.leaving = remaining
        for slot in self._sequences.vacated:
            self._memory.release_slot(slot)
        builder.freed_slots += self._sequences.vacated
        self._sequences.vacated.clear()

    def _make_room_for_prompts(self, builder: PlanBuilder) -> None:
        """Preempt sequences for a prompt that found no room in the previous plan."""
        lacking, self.prefilling.lacking = self.prefilling.lacking, None
        if lacking is not None and lacking[0].status is Status.PREFILLING:
            self._make_pages(*lacking, builder)

    def _make_pages(self, seq: Sequence, tokens: int, builder: PlanBuilder) -> bool:
        """Give ``seq`` pages for so many positions. If there is no room, the last sequences are
        preempted, and at last ``seq`` itself: then return False. Also if room is coming, as it is
        for a sequence that is alone: it may have restored the state that takes its room."""
        while not self._memory.grow(seq, tokens):
            builder.changed = True
            is_leaving = self._sequences.leaving or self._sequences.count(Status.ENDING)
            if is_leaving or self._memory.has_pages_after_plan:
                return False
            running = self._sequences.ordered(Status.PREFILLING, Status.READY, Status.DECODING)
            if running == [seq]:
                return False
            last = running[-1]
            self.preempt(last, builder)
            if last is seq:
                return False
        return True

    def preempt(self, seq: Sequence, builder: PlanBuilder) -> None:
        """Take pages and slot of ``seq`` away. What it computed stays cached as long as there is
        room."""
        self.prefilling.passes.drop(seq)
        self._sequences.preempt(seq)
        self._prefix_cache.name_computed(seq, builder.step)
        self._memory.release(seq)
        self._snapshot_policy.touch_trailing(seq)
        builder.preempt(seq)
        self._counters.preemptions += 1

    # -- joining -------------------------------------------------------------------

    def _admit(self, builder: PlanBuilder) -> None:
        """Admit waiting sequences in order. A sequence that does not fit blocks those behind it;
        otherwise a large request would starve."""
        while True:
            seq = self._sequences.waiting.peek()
            if seq is None or seq.num_inflight:
                return
            used = len(self._memory.used_slots)
            is_full = self._sequences.num_running >= self.backoff.limit
            if is_full or self._retry.skips(seq.request.request_id, used):
                self._preempt_background_for(seq, builder)
                return
            cached = CachedPrefix([], None, 0)
            if self._config.prefix_cache:
                seq.update_block_hashes()
                self._snapshot_policy.publish_trailing(seq)
                reusable = seq.num_restorable_tokens // self._config.block_size
                cached = self._memory.pages.match(seq.block_hashes[:reusable])
                if self._request_fetch(seq, cached, reusable):
                    builder.changed = True
                    continue
                # They are needed now: evict something else to make room.
                end = cached.blocks if self._config.keeps_kv else reusable
                self._snapshot_policy.touch_prefix(seq, end)
                self._memory.pages.touch(cached)
            slot = self._memory.take_slot() if self._fits(seq, cached) else None
            if slot is None:
                self._retry.refused(seq.request.request_id, used)
                self._preempt_background_for(seq, builder)
                return
            self._sequences.waiting.pop()
            seq.begin(slot, self._clock())
            self._sequences.set_status(seq, Status.PREFILLING)
            self._memory.begin(seq)
            self._prefix_cache.share(seq, builder)
            self._snapshot_policy.choose_positions(seq)

    def _fits(self, seq: Sequence, cached: CachedPrefix) -> bool:
        """Return whether there is room for the prompt of ``seq``, of which some pages are
        ``cached``, beside the prompts and the next tokens of the answers of those that run."""
        if not self._memory.holders and not self._sequences.num_running:
            return True
        memory, config = self._memory, self._config
        missing = memory.pages_for(len(seq.token_ids)) - len(cached.pages)
        own_bytes = sum(not page.refs for page in cached.pages) * config.page_bytes
        free_bytes = memory.available_bytes() - own_bytes - memory.reserved_bytes()
        return memory.needed_bytes(seq, missing) <= free_bytes

    def _preempt_background_for(self, seq: Sequence, builder: PlanBuilder) -> None:
        """Preempt a background sequence, if there is one, for ``seq``. Its slot is free in the next
        plan."""
        if seq.is_background or builder.preempted:
            return
        running = self._sequences.ordered(Status.PREFILLING, Status.READY, Status.DECODING)
        if running and running[-1].is_background:
            self.preempt(running[-1], builder)
            builder.changed = True

    def _request_fetch(self, seq: Sequence, cached: CachedPrefix, reusable: int) -> bool:
        """Move ``seq`` from the head of the queue to the sequences waiting for the kvstore, if
        that may have pages or states that are not in memory. Return whether it was moved."""
        config, fetch = self._config, seq.fetch
        if not config.uses_store or fetch.requested:
            return False
        size = config.blocks_per_page if config.keeps_kv else 1
        first = len(cached.pages) if config.keeps_kv else reusable
        last = reusable // size
        usable = self._snapshot_policy.restorable_end(seq, 0, first * size)
        if usable >= last * size or len(self._sequences.loading) >= config.completion_batch_size:
            return False
        self._memory.pages.touch(cached)
        parts = seq.block_hashes[first * size : reusable] if config.stores_parts else []
        wanted = -(-len(parts) // size) if parts else last - first
        room = self._memory.reserve_fetch(seq, wanted)
        if room is None:
            return False
        self._sequences.waiting.pop()
        fetch.requested, fetch.first_page, fetch.first_state = True, first, usable
        end = min(first + room, last) * size
        search = self._snapshot_policy.search(seq, usable, first * size, end)
        self._outputs.fetches.append(
            Fetch(
                self._next_ticket,
                seq.block_hashes[(first + 1) * size - 1 : end : size],
                PartSearch(parts[: room * size], size) if parts else search,
                fetch.cancellation,
            )
        )
        self._sequences.start_loading(seq, self._next_ticket)
        self._next_ticket += 1
        return True

    def _rematch(self, builder: PlanBuilder) -> None:
        """Let prefilling sequences share what others have computed since."""
        size, ahead = self._config.block_size, {*self.prefilling.claimed()}
        for seq in self._sequences.ordered(Status.PREFILLING):
            if self.prefilling.passes.of(seq) is not None:
                continue
            if self._config.prefix_cache and seq.num_computed_tokens < seq.prefill_end:
                self._prefix_cache.share(seq, builder, ahead)
                number = seq.num_computed_tokens // size
                is_ahead = not ahead.isdisjoint(seq.block_hashes[number : number + 1])
                if not (seq.is_restoring or is_ahead):
                    self._prefix_cache.copy_running(seq, builder)
                ahead.update(() if seq.is_restoring else seq.block_hashes[number : number + 1])
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
            # Also a stream that is left out waits for its next token: drafts are in flight.
            is_awaited = any(seq.num_inflight for seq in table.ordered(Status.DECODING))
            streaming = bool(builder.decodes) or is_awaited
            if self.prefilling.has_turn or not streaming:
                self.prefilling.plan(builder, streaming=streaming)
            return
        prompts_first = self.prefilling.has_turn and not self._waits_for_first_token()
        is_decoding = table.count(Status.DECODING) > 0
        if prompts_first or not is_decoding or self.prefilling.is_within_share:
            joined = self.prefilling.join_decode(builder, streaming=is_decoding)
            prompts_first = prompts_first and not joined
        if not prompts_first:
            self._decode(builder)
        if not builder.decodes:
            self.prefilling.plan(builder, streaming=streaming)
        if prompts_first and not builder.has_prompts:
            self._decode(builder)

    def _waits_for_first_token(self) -> bool:
        """Return whether prompts wait for a sequence whose prompt is complete, and which gets a
        decode row now.

        They do not wait twice in a row. Otherwise a series of such sequences, most of them
        served from the cache, could starve them."""
        has_row = self._sequences.count(Status.DECODING) < self._config.max_batch_size
        ready = has_row and self._sequences.count(Status.READY) > 0
        self._waited_for_first_token = ready and not self._waited_for_first_token
        return self._waited_for_first_token

    def _decode(self, builder: PlanBuilder) -> None:
        """Plan a decode for every sequence that has a row, after new sequences took the free
        rows."""
        ready = self._sequences.ordered(Status.READY)
        self._take_rows_back(ready)
        for seq in ready:
            if self._sequences.count(Status.DECODING) >= self._config.max_batch_size:
                break
            self._sequences.set_status(seq, Status.DECODING)
        decoding = self._sequences.ordered(Status.DECODING)
        rows = [
            seq
            for seq in decoding
            if not _waits_to_end_thinking(seq) and not self._drafting.waits(seq, len(decoding))
        ]
        rows = self._with_pages(rows, builder)
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
        builder.step.ends = [end for end in builder.step.ends if end.seq in builder.step.decodes]

    def _with_pages(self, rows: list[Sequence], builder: PlanBuilder) -> list[Sequence]:
        """Return those of ``rows`` that have pages for their next token."""
        for seq in rows:
            if seq.status is Status.DECODING:
                self._make_pages(seq, seq.next_position + 1, builder)
        found = []
        for seq in rows:
            if seq.status is not Status.DECODING:
                continue
            if seq.capacity <= seq.next_position:
                if seq.num_computed_tokens < seq.prefill_end:
                    self._sequences.set_status(seq, Status.READY)
                continue
            found.append(seq)
            if seq.drafts is not None:
                ahead = min(seq.next_position + 1 + DRAFT_TOKENS, seq.max_positions)
                self._memory.grow(seq, ahead, evicts=False)
            is_last = seq.next_position + 1 >= seq.max_positions
            if not is_last or seq in self._memory.unpacked_bytes:  # else nothing reads it again
                self._memory.unpack(seq, min(seq.capacity, seq.max_positions))
        return found

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

    def _finish_plan(self, builder: PlanBuilder) -> None:
        """Let others find what this plan computes, and save states. This comes last, because the
        plan must not share it."""
        self._prefix_cache.name_inserted(builder)
        for seq, _, _ in builder.step.completed:
            if seq.status is not Status.FINISHED:
                self._prefix_cache.name_computed(seq, builder.step)
                self._snapshot_policy.after_chunk(seq, builder)
        for seq in builder.step.decodes:
            self._prefix_cache.name_computed(seq, builder.step)
            self._snapshot_policy.after_decode(seq, builder)

    def _release_leaving(self, builder: PlanBuilder) -> None:
        """Save the states of finished and preempted sequences, and free their slots."""
        passes = self.prefilling.passes
        staying = [seq for seq in self._sequences.leaving if passes.of(seq) is not None]
        leaving = [seq for seq in self._sequences.leaving if passes.of(seq) is None]
        for seq in (*leaving, *builder.preempted):
            self._snapshot_policy.before_leaving(seq, builder)
            self._memory.release(seq)
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
