"""The decisions of one step, in their order."""

from __future__ import annotations

from collections.abc import Callable

from engine.plan import Chunk, Decode, Insert, Move
from engine.scheduler.caution import Caution
from engine.scheduler.chunks import ChunkPolicy
from engine.scheduler.config import SchedulerConfig
from engine.scheduler.draft import Draft
from engine.scheduler.memory import Memory
from engine.scheduler.outputs import Counters, Outputs
from engine.scheduler.pool import Block
from engine.scheduler.recurrence import StateKeeper
from engine.scheduler.roster import Roster
from engine.scheduler.sequence import HOLDING, Sequence, State
from shared import wire

SCORED_TOKENS = 128
"""The longest chunk whose log-probabilities are wanted: they take logits of every position."""


class Planner:
    """Fills drafts. What it decides takes effect at once in roster and memory, which
    thereby show the state after every plan made so far."""

    def __init__(
        self,
        config: SchedulerConfig,
        roster: Roster,
        memory: Memory,
        keeper: StateKeeper,
        policy: ChunkPolicy,
        outputs: Outputs,
        counters: Counters,
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._roster = roster
        self._memory = memory
        self._keeper = keeper
        self._policy = policy
        self._outputs = outputs
        self._counters = counters
        self._clock = clock
        self._next_ticket = 0
        self.caution = Caution(config.completion_batch_size)

    def fill(self, draft: Draft) -> None:
        self._free_slots(draft)
        roomy = self._grow(draft)
        if roomy:
            self._admit(draft)
        self._rematch(draft)
        self._decode(draft)
        self._prefill(draft)
        if roomy:
            self._publish(draft)
        self._clear_out(draft)

    def _free_slots(self, draft: Draft) -> None:
        """Slots that no plan from here on uses. Finished sequences with blocks to save
        keep theirs for this one."""
        remaining = []
        for seq in self._roster.leaving:
            unsaved = seq.saved < seq.publishable and self._config.reuses_kv
            if unsaved or self._keeper.is_owed(seq):
                remaining.append(seq)
            else:
                self._roster.vacate(seq)
        self._roster.leaving = remaining
        for slot in self._roster.vacated:
            self._memory.slots.release(slot)
            draft.changed = True
        self._roster.vacated.clear()

    def _grow(self, draft: Draft) -> bool:
        """Moves rows that are full to larger slots. False when one found no room: then
        nobody may join and nothing is cached before it has got some."""
        roomy = True
        for seq in self._roster.ordered(State.DECODING):
            # A Move would lose the token that only the device knows: wait for it.
            if seq.computed < seq.capacity or seq.pending or seq.state is not State.DECODING:
                continue
            grown = self._memory.acquire(self._wanted_tokens(seq))
            if grown is not None:
                source = seq.holder
                draft.moves.append(Move(source, grown[0], seq.computed))
                self._roster.vacate(seq)
                seq.slot, seq.capacity = grown
                seq.stalled = False
                continue
            roomy = False
            draft.changed = True
            room_is_coming = (
                self._roster.leaving
                or self._roster.count(State.ENDING)
                or self._memory.pool.evictable < len(self._memory.pool)
            )
            if seq.stalled and not room_is_coming:
                seq.stalled = False
                self._preempt(self._roster.ordered(*HOLDING)[-1], draft)
            else:
                seq.stalled = True
        return roomy

    def _preempt(self, seq: Sequence, draft: Draft) -> None:
        self._roster.preempt(seq)
        if self._config.prefix_cache:
            seq.extend_hashes()
        seq.saved = self._memory.pool.refresh(seq.hashes[: seq.publishable])
        self._keeper.touch(seq)
        draft.preempted.append(seq)
        self._counters.preemptions += 1

    def _wanted_tokens(self, seq: Sequence) -> int:
        """What is there, and some more, so that it need not move soon."""
        return min(seq.positions, len(seq.tokens) + self._memory.smallest_capacity // 4)

    # -- joining -------------------------------------------------------------------

    def _admit(self, draft: Draft) -> None:
        """Gives slots to those that wait, strictly in order: whom there is no room for
        is not overtaken, or a large request would wait for ever."""
        while self._roster.holders < self.caution.limit:
            seq = self._roster.waiting.peek()
            if seq is None or seq.pending:
                return
            cached = 0
            reusable = seq.restorable // self._config.block_size
            if self._config.prefix_cache:
                seq.extend_hashes()
                self._keeper.settle(seq)
                cached = self._memory.pool.match(seq.hashes[:reusable])
                if self._ask_store(seq, cached, reusable):
                    draft.changed = True
                    continue
                # Used just now: what must go to make room should be something else.
                self._keeper.refresh(seq, cached if self._config.keeps_kv else reusable)
                self._memory.pool.refresh(seq.hashes[:cached])
            acquired = self._memory.acquire(self._wanted_tokens(seq))
            if acquired is None:
                return
            self._roster.waiting.pop()
            seq.begin(*acquired, self._clock())
            self._roster.hold(seq, State.PREFILLING)
            self._restore(seq, draft)
            self._keeper.begin(seq)
            seq.payloads.clear()
            self._memory.give_back(seq)

    def _ask_store(self, seq: Sequence, cached: int, reusable: int) -> bool:
        """Sends ``seq``, at the head of the queue, to wait for the kvstore, where that
        might have what memory has not."""
        if not self._config.uses_store or seq.asked or cached == reusable:
            return False
        if len(self._roster.loading) >= self._config.completion_batch_size:
            return False
        self._memory.pool.refresh(seq.hashes[:cached])
        room = self._memory.set_aside(seq, reusable - cached)
        if not room:
            return False
        self._roster.waiting.pop()
        seq.asked, seq.first_asked = True, cached
        self._outputs.fetches.append((self._next_ticket, seq.hashes[cached : cached + room]))
        self._roster.load(seq, self._next_ticket)
        self._next_ticket += 1
        return True

    def _rematch(self, draft: Draft) -> None:
        """Others may have published what a prefilling sequence needs next."""
        for seq in self._roster.ordered(State.PREFILLING):
            if self._config.prefix_cache and seq.computed < seq.target:
                self._restore(seq, draft)
            if seq.computed == seq.target:
                self._roster.hold(seq, State.READY)

    def _restore(self, seq: Sequence, draft: Draft) -> None:
        """Copies the cached blocks that follow what ``seq`` has, if there are any; where the
        model has state, up to the last snapshot of it."""
        size = self._config.block_size
        first = seq.computed // size
        end = self._keeper.reach(seq, first, min(seq.restorable // size, len(seq.hashes)))
        known = len(draft.inserts)
        blocks = self._chain(seq, first, end, draft) if self._config.keeps_kv else []
        if self._config.keeps_kv:
            end = self._keeper.reach(seq, first, first + len(blocks))
        draft.hold(seq, blocks[end - first :])
        if end == first:
            return
        new = {insert.block for insert in draft.inserts[known:]}
        inserted = sum(block.id in new for block in blocks[: end - first])
        if blocks:
            draft.restore(seq, blocks[: end - first])
        self._keeper.restore(seq, end, draft)
        ram, ssd = seq.reuse((end - first - inserted) * size, inserted * size)
        self._counters.cached_ram_tokens += ram
        self._counters.cached_ssd_tokens += ssd
        if self._config.uses_store:
            self._outputs.touches.extend(seq.hashes[first:end])
        seq.computed = seq.kept = end * size
        seq.saved = end
        seq.reached = max(seq.reached, seq.computed)

    def _chain(self, seq: Sequence, first: int, end: int, draft: Draft) -> list[Block]:
        """The blocks of ``seq`` from number ``first`` to ``end``, as far as they are there
        without a gap, pinned. What came from the kvstore is inserted."""
        blocks: list[Block] = []
        for number in range(first, end):
            block = self._memory.pool.get(seq.hashes[number])
            if block is not None:
                self._memory.pool.pin(block)
            elif number in seq.payloads:
                block = self._memory.add_fetched_block(seq.hashes[number], seq)
                if block is None:
                    break
                draft.inserts.append(Insert(block.id, seq.payloads[number]))
            else:
                break
            blocks.append(block)
        return blocks

    # -- computing -----------------------------------------------------------------

    def _decode(self, draft: Draft) -> None:
        for seq in self._roster.ordered(State.READY):
            if self._roster.count(State.DECODING) >= self._config.max_batch_size:
                break
            self._roster.hold(seq, State.DECODING)
        rows = [seq for seq in self._roster.ordered(State.DECODING) if seq.computed < seq.capacity]
        for seq in sorted(rows, key=lambda seq: seq.holder):
            request = seq.request
            index = seq.computed + 1 - seq.prompt_length
            history = self._history(seq)
            draft.decode(
                seq,
                Decode(
                    slot=seq.holder,
                    position=seq.computed,
                    token=None if seq.pending else seq.tokens[seq.computed],
                    output_index=index,
                    sampling=request.sampling,
                    forbidden=self._forbidden(request, index),
                    logprobs=request.logprobs,
                    history=history,
                    constrained=request.grammar is not None,
                    grammar=None if history is None else request.grammar,
                ),
            )
            seq.computed += 1
            seq.pending += 1
            seq.reached = max(seq.reached, seq.computed)
            if seq.exhausted:
                self._roster.hold(seq, State.ENDING)

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
        if seq.recorded or not (request.sampling.looks_back or request.grammar is not None):
            return None
        seq.recorded = True
        return tuple(seq.tokens[: seq.computed])

    def _prefill(self, draft: Draft) -> None:
        """The oldest get the budget first, so that they start one after the other."""
        budget = self._policy.budget(streaming=bool(draft.decodes))
        size = self._config.block_size
        claimed: set[bytes] = set()
        prefilling = self._roster.ordered(State.PREFILLING)
        limits = self._keeper.limits(prefilling)
        for seq in prefilling:
            if len(draft.chunks) == self._config.prefill_batch_size:
                break
            # Somebody ahead computes this very block now; at the next step it is there.
            number = seq.computed // size
            # (Who wants to know how likely its tokens are has to compute it by itself.)
            if not seq.scoring and number < len(seq.hashes) and seq.hashes[number] in claimed:
                continue
            if seq not in limits:
                continue
            remaining = limits[seq] - seq.computed
            if seq.scoring:
                remaining = min(remaining, max(SCORED_TOKENS // size, 1) * size)
            tokens = budget.take(seq.computed, remaining)
            if not tokens:
                continue
            end = seq.computed + tokens
            draft.chunk(seq, self._chunk(seq, end))
            if not self._config.reuses_states:
                claimed.update(seq.hashes[number : end // size])
            seq.computed = end
            seq.reached = max(seq.reached, end)
            if end == seq.target:
                self._roster.hold(seq, State.READY)

    def _chunk(self, seq: Sequence, end: int) -> Chunk:
        start = seq.computed
        tokens = tuple(seq.tokens[start:end])
        if not seq.scoring:
            return Chunk(seq.holder, start, tokens)
        followers = tuple(seq.request.token_ids[start + 1 : end + 1])
        return Chunk(seq.holder, start, tokens, followers, seq.request.prompt_logprobs or 0)

    # -- leaving -------------------------------------------------------------------

    def _publish(self, draft: Draft) -> None:
        """Saves what is full, at the very end: nothing in this plan may restore from it."""
        for seq, _, _ in draft.step.chunks:
            self._save(seq, draft)
            self._keeper.after_chunk(seq, draft)
        for seq in draft.step.decodes:
            self._save(seq, draft)
            self._keeper.after_decode(seq, draft)

    def _clear_out(self, draft: Draft) -> None:
        """The last plan for those who give up their slots: what they computed stays."""
        for seq in self._roster.leaving:
            self._save(seq, draft)
            self._keeper.before_leaving(seq, draft)
            self._roster.vacate(seq)
            draft.changed = True
        self._roster.leaving = []
        for seq in draft.preempted:
            self._save(seq, draft)
            self._keeper.before_leaving(seq, draft)
            self._roster.vacate(seq)
            seq.reset()
            self._roster.enqueue(seq, State.PREEMPTED)

    def _save(self, seq: Sequence, draft: Draft) -> None:
        """Saves the full blocks that the pool lacks, as far as there is room."""
        if not self._config.prefix_cache:
            return
        seq.extend_hashes()
        if not self._config.keeps_kv:
            return
        export = self._config.uses_store and self._config.store_policy == "write_through"
        run: list[Block] = []
        while seq.saved < seq.publishable:
            block = None
            if seq.hashes[seq.saved] not in self._memory.pool:
                block = self._memory.add_block(seq.hashes[seq.saved])
                if block is None:
                    break
                run.append(block)
            elif run:
                draft.save(seq, seq.saved - len(run), run, export=export)
                run = []
            seq.saved += 1
        if run:
            draft.save(seq, seq.saved - len(run), run, export=export)
