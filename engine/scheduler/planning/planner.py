"""The decisions of one step, in order."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from collections.abc import Sequence as SequenceOf

from engine.plan import PartSearch
from engine.scheduler.config import SchedulerConfig
from engine.scheduler.memory import Memory
from engine.scheduler.outputs import Counters, Fetch, Outputs
from engine.scheduler.planning.drafting import Drafting
from engine.scheduler.planning.passes import OpenPass, OpenPasses, PlannedChunk
from engine.scheduler.planning.pictures import PictureGroup, PictureTable, WholePictures
from engine.scheduler.planning.plan_builder import PlanBuilder, PlannedEncoding
from engine.scheduler.planning.prefix_cache import PrefixCache
from engine.scheduler.pools.page_pool import CachedPrefix
from engine.scheduler.sequences.sequence import Sequence, SequencePicture, Status
from engine.scheduler.sequences.sequence_table import SequenceTable
from engine.scheduler.timing.backoff import AdmissionRetry, ConcurrencyBackoff
from engine.scheduler.timing.chunks import MIN_TOKENS, ChunkPolicy
from engine.scheduler.timing.time_share import MUCH_SHORTER, Lead, TimeShare

logger = logging.getLogger(__name__)

Clock = Callable[[], float]

DRAFT_TOKENS = 32
"""Positions for drafts and guesses for which a sequence gets pages ahead, if there are any."""
LOGPROBS_CHUNK_TOKENS = 64
"""Max chunk with log-probabilities, which need the logits of every position."""
MIN_SHARED = 16
"""Prompts with fewer tokens left count as this long if chunks share a pass."""
MAX_END_TOKENS = 32
"""The rest of a prompt whose prefix is cached does not count as a prompt of its pass if it is at
most this long: many are little work, and one after the other each takes a pass over the weights."""
MAX_SCORES_SHARE = 1 / 4
"""Max attention scores of a chunk, as a fraction of the memory: cached blocks make room for them.
Longer chunks would hardly be faster."""


class Planner:
    """Fills plan builders. Its decisions take effect immediately in the sequence table and in
    memory, which therefore show the state after every plan made so far."""

    def __init__(
        self,
        config: SchedulerConfig,
        sequences: SequenceTable,
        memory: Memory,
        prefix_cache: PrefixCache,
        drafting: Drafting,
        chunk_policy: ChunkPolicy,
        time_share: TimeShare,
        outputs: Outputs,
        counters: Counters,
        clock: Clock,
    ) -> None:
        self._config = config
        self._sequences = sequences
        self._memory = memory
        self._prefix_cache = prefix_cache
        self._snapshot_policy = prefix_cache.snapshot_policy
        self._drafting = drafting
        self._chunk_policy = chunk_policy
        self._time_share = time_share
        self._outputs = outputs
        self._counters = counters
        self._clock = clock
        self.passes = OpenPasses(memory)
        self.pictures = PictureTable(config)
        self.backoff = ConcurrencyBackoff(config.completion_batch_size)
        self._retry = AdmissionRetry()
        self._next_ticket = 0
        self._lacking: tuple[Sequence, int] | None = None
        """A prompt that found no page in the last plan, and the length for which it needs them."""
        self._waited_for_first_token = False
        """Whether prompts were due in the last plan, but waited for a sequence's first token."""
        self._group = PictureGroup(self.pictures)
        self._whole_pictures = WholePictures(config)
        self._lead = Lead()
        self._layer_s = 0.0
        """Predicted time of one layer of the last stretch."""
        self._stretch_s = 0.0

    def clear(self) -> None:
        """Forget passes and pictures, because the executor has lost them."""
        self._lacking = None
        self.passes.clear()
        self.pictures.clear()

    def fill(self, builder: PlanBuilder) -> None:
        """Decide one step, and add its operations to ``builder``."""
        self.passes.drop_abandoned()
        self.pictures.drop_abandoned(self._sequences.ordered(Status.PREFILLING))
        self._free_slots(builder)
        self._memory.update_gathers()
        self._make_room_for_prompts(builder)
        self._admit(builder)
        self._rematch(builder)
        self._compute(builder)
        self._finish_plan(builder)
        self._release_leaving(builder)
        builder.dropped_passes += self.passes.take_dropped()
        builder.dropped_pictures += self.pictures.take_dropped()
        builder.exported += self._memory.backlog.take()

    def _free_slots(self, builder: PlanBuilder) -> None:
        """Free the slots that no later plan uses. Finished sequences whose state is worth saving
        keep theirs for this plan."""
        remaining = []
        for seq in self._sequences.leaving:
            if self.passes.of(seq) is not None:
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
        lacking, self._lacking = self._lacking, None
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
        self.passes.drop(seq)
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
        size, ahead = self._config.block_size, {*self._claimed()}
        for seq in self._sequences.ordered(Status.PREFILLING):
            if self.passes.of(seq) is not None:
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

    # -- prompts or decodes --------------------------------------------------------

    def _compute(self, builder: PlanBuilder) -> None:
        """Plan decodes, a stretch of a prompt, or both.

        With look-ahead, tokens do not wait for the prompts in their plan. Without it they would,
        so a plan has one or the other."""
        table, streams = self._sequences, (Status.READY, Status.DECODING)
        has_prompts, has_streams = table.has_foreground(Status.PREFILLING), table.count(*streams)
        if has_prompts and has_streams and not table.has_foreground(*streams):
            # Background streams leave all the time to a prompt that a client is waiting for.
            self._time_share.clear()
            if not self._join_decode(builder, streaming=False):
                self._prefill(builder, streaming=False)
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
            if self._is_turn_of_prompts() or not streaming:
                self._prefill(builder, streaming=streaming)
            return
        prompts_first = self._is_turn_of_prompts() and not self._waits_for_first_token()
        is_decoding = table.count(Status.DECODING) > 0
        # Within their share of the time, short ends join the next decode: it takes little longer,
        # and their first tokens come a step sooner.
        if prompts_first or not is_decoding or self._time_share.available_s >= 0:
            joined = self._join_decode(builder, streaming=is_decoding)
            prompts_first = prompts_first and not joined
        if not prompts_first:
            self._decode(builder)
        if not builder.decodes:
            self._prefill(builder, streaming=streaming)
        if prompts_first and not builder.has_prompts:
            self._decode(builder)

    def _is_turn_of_prompts(self) -> bool:
        """Return whether prompts are due, although streams run too."""
        return self._time_share.is_turn_of_prompts(self._layer_s)

    def _waits_for_first_token(self) -> bool:
        """Return whether prompts wait for a sequence whose prompt is complete, and which gets a
        decode row now.

        They do not wait twice in a row. Otherwise a series of such sequences, most of them
        served from the cache, could starve them."""
        has_row = self._sequences.count(Status.DECODING) < self._config.max_batch_size
        ready = has_row and self._sequences.count(Status.READY) > 0
        self._waited_for_first_token = ready and not self._waited_for_first_token
        return self._waited_for_first_token

    # -- decodes -------------------------------------------------------------------

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
            builder.decode(seq, proposal, guesses)
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

    # -- prompts: passes of chunks, a stretch of layers at a time ------------------

    def _prefill(self, builder: PlanBuilder, *, streaming: bool) -> None:
        """Add a stretch of one pass to ``builder``, if there are prompts to compute.

        The oldest prompt comes first, so that streams start one after the other. A much shorter
        prompt overtakes it between two layers of its pass."""
        prefilling = self._sequences.ordered(Status.PREFILLING)
        limits = self._snapshot_policy.prefill_limits(prefilling)
        candidates = [
            seq
            for seq in prefilling
            if not seq.is_restoring and (seq in limits or self.passes.of(seq) is not None)
        ]
        claimed = self._claimed()
        while candidates:
            seq = self._first_prompt(candidates)
            one = self.passes.of(seq)
            if one is None and not self._is_claimed(seq, claimed):
                picture, limits[seq] = self.pictures.missing(seq, limits[seq])
                if picture is not None:
                    self._encode(picture, seq, builder, streaming=streaming)
                    self._lead.count(self._stretch_s, of_overtaken=seq is candidates[0])
                    return
                has_room = limits[seq] > seq.num_computed_tokens
                if has_room and not streaming:
                    others = [c for c in candidates if c is not seq and not self.passes.of(c)]
                    wanted = self._group.next(
                        seq, others, limits, lambda c: not self._is_claimed(c, claimed)
                    )
                    if wanted is not None:
                        self._encode(
                            wanted.picture, wanted.seq, builder, streaming=False, kept=wanted.kept
                        )
                        self._group.spend(self._stretch_s)
                        return
                if has_room:  # else it waits for memory for a picture
                    one = self._begin(
                        seq, candidates, limits, claimed, builder, streaming=streaming
                    )
            if one is not None:
                self._advance(one, builder, streaming=streaming)
                has_first = any(chunk.seq is candidates[0] for chunk in one.chunks)
                self._lead.count(self._stretch_s, of_overtaken=has_first)
                return
            candidates.remove(seq)

    def _join_decode(self, builder: PlanBuilder, *, streaming: bool) -> bool:
        """Let the decode of this plan compute the ends of prompts that come before others: all, or
        as many as fit if ``streaming`` (others wait for their next token). Return whether there
        are any. A pass of their own would read the weights once more."""
        if not self._config.decodes_ends:
            return False
        table = self._sequences
        prefilling = [seq for seq in table.ordered(Status.PREFILLING) if not seq.is_restoring]
        candidates = [seq for seq in prefilling if self._is_decodable_end(seq)]
        rows = self._config.max_batch_size - table.count(Status.READY, Status.DECODING)
        if not candidates or not self._is_decodable_end(self._first_prompt(prefilling)):
            return False
        claimed = self._claimed()
        whole_s = left_s = self._chunk_policy.ends_s(streaming=streaming)
        joined: list[PlannedChunk] = []
        for seq in candidates[: max(rows, 0)]:
            if self._is_claimed(seq, claimed):
                continue
            start, end = seq.num_computed_tokens, seq.prefill_end
            seconds = self._chunk_policy.predict_s(start, end - start)
            if seconds > left_s and streaming:
                break  # streams would notice it; a pass is computed between their tokens
            if seconds > left_s and joined:
                return False  # a pass can compute all of them, and be interrupted
            left_s -= seconds
            joined.append(PlannedChunk(seq, start, end))
            size = self._config.block_size
            claimed |= dict.fromkeys(seq.block_hashes[start // size : (end + 1) // size], 1)
        if not joined:
            return False
        builder.step.ends += joined
        for chunk in joined:
            table.set_status(chunk.seq, Status.READY)
        self._stretch_s = whole_s - left_s
        self._lead.count(self._stretch_s, of_overtaken=prefilling[0] is joined[0].seq)
        if streaming:
            builder.step.ends_charged_s = self._stretch_s
            self._time_share.planned(self._stretch_s)
        return True

    def _is_decodable_end(self, seq: Sequence) -> bool:
        """Return whether a decode may compute the rest of the prompt of ``seq``."""
        is_simple = not (seq.pictures or seq.needs_prompt_logprobs)
        is_open = self.passes.of(seq) is not None
        most = min(MAX_END_TOKENS, self._config.prefill_chunk_tokens or MAX_END_TOKENS)
        return is_simple and not is_open and 0 < _tokens_left(seq) <= most

    def _first_prompt(self, candidates: SequenceOf[Sequence]) -> Sequence:
        """Return the next of ``candidates``, which are in order: the first one, or a much
        shorter one whose priority is not lower."""
        first = candidates[0]
        if self._lead.is_used_up:
            return first
        chosen = first
        for seq in candidates[1:]:
            is_shorter = MUCH_SHORTER * _tokens_left(seq) <= _tokens_left(chosen)
            if is_shorter and seq.request.priority >= first.request.priority:
                chosen = seq
        return chosen

    def _claimed(self) -> dict[bytes, int]:
        """Return `OpenPasses.claimed`, nothing if blocks are useless without a state."""
        if self._config.reuses_states:
            return {}
        return self.passes.claimed(self._config.block_size, self._config.layers)

    def _is_claimed(self, seq: Sequence, claimed: dict[bytes, int]) -> bool:
        """Return whether others compute the next blocks of ``seq``, as many as are worth the wait.
        A sequence that needs its prompt's log-probabilities has to compute them itself."""
        number = seq.num_computed_tokens // self._config.block_size
        if number >= len(seq.block_hashes) or seq.needs_prompt_logprobs:
            return False
        worth = claimed.get(seq.block_hashes[number], 0)
        hashes = seq.block_hashes[number : number + worth]
        return len(hashes) == worth > 0 and all(each in claimed for each in hashes)

    # -- beginning a pass ----------------------------------------------------------

    def _begin(
        self,
        first: Sequence,
        candidates: SequenceOf[Sequence],
        limits: dict[Sequence, int],
        claimed: dict[bytes, int],
        builder: PlanBuilder,
        *,
        streaming: bool,
    ) -> OpenPass | None:
        """Start a pass with a chunk of ``first``, which has to compute it, and chunks of other
        prompts that are about as short. Return None if there are no pages for it."""
        budget = self._chunk_policy.budget(streaming=streaming, grouped=first.has_pictures_ahead)
        size = self._config.block_size
        chunks: list[PlannedChunk] = []
        reserved = 0  # bytes
        others = [seq for seq in candidates if seq is not first]
        left = self._config.prefill_batch_size
        for seq in (first, *others):
            is_short_end = seq.num_computed_tokens > 0 and _tokens_left(seq) <= MAX_END_TOKENS
            is_counted = not is_short_end
            if is_counted and not left:
                continue
            if self.passes.of(seq) is not None:
                continue
            if chunks and not self._may_share(chunks[0].seq, seq):
                continue
            if seq is not first and self._is_claimed(seq, claimed):
                continue
            start = seq.num_computed_tokens
            if seq is not first and seq.has_pictures_ahead:
                picture, limits[seq] = self.pictures.missing(seq, limits[seq])
                if picture is not None or limits[seq] == start:
                    continue
            remaining = limits[seq] - start
            if seq.needs_prompt_logprobs:
                remaining = min(remaining, max(LOGPROBS_CHUNK_TOKENS // size, 1) * size)
            tokens = budget.take(start, remaining)
            if tokens and not chunks:
                tokens, reserved = self._within_memory(start, self._pages_for_chunk(seq, tokens))
                tokens, reserved = self._with_whole_pictures(seq, tokens, reserved)
                if not (tokens and self._pages_for_chunk(seq, tokens) == tokens):
                    self._memory.release_pass(reserved)
                    return None
            elif not (tokens and self._memory.grow(seq, start + tokens)):
                continue
            elif self._memory.reserve_pass(more := self._pass_bytes(start, tokens)):
                reserved += more
            else:
                continue
            self._memory.unpack(seq, seq.prefill_end + 1)
            left -= is_counted
            chunks.append(PlannedChunk(seq, start, start + tokens))
            builder.chunk(seq, start + tokens)
            claimed |= dict.fromkeys(seq.block_hashes[start // size : (start + tokens) // size], 1)
        assert chunks, "a pass has a chunk"
        self._group.begun()
        begun = OpenPass(builder.step.number, chunks, reserved)
        logger.debug("pass %d: chunks (start, tokens) %s", begun.number, begun.sizes)
        self.passes.begin(begun)
        return begun

    def _may_share(self, first: Sequence, seq: Sequence) -> bool:
        """Return whether ``seq`` may have a chunk in the pass of ``first``, which waits for it."""
        if seq.is_background and not first.is_background:
            return False
        scored = first.needs_prompt_logprobs or seq.needs_prompt_logprobs
        if first.has_pictures_ahead != seq.has_pictures_ahead:
            return False
        if seq.has_pictures_ahead and self._config.whole_picture_tokens:
            return False
        is_longer = _tokens_left(seq) >= MUCH_SHORTER * max(_tokens_left(first), MIN_SHARED)
        return self._config.batches_chunks and not scored and not is_longer

    def _within_memory(self, start: int, tokens: int) -> tuple[int, int]:
        """Return how many of the ``tokens`` from ``start`` fit into memory, and how many bytes the
        ledger has reserved for them. A few tokens use part of the memory that is kept free for
        steps."""
        size = self._config.block_size
        scores_bytes = int(self._config.limit_bytes * MAX_SCORES_SHARE)
        while tokens > MIN_TOKENS:
            wanted = self._pass_bytes(start, tokens, free=MIN_TOKENS)
            fits = self._scores_bytes(start, tokens) <= scores_bytes
            if fits and self._memory.reserve_pass(wanted):
                return tokens, wanted
            tokens = max(MIN_TOKENS, tokens // 2) // size * size or min(tokens, size)
            if tokens <= max(MIN_TOKENS, size):
                break
        return tokens, 0

    def _pass_bytes(self, start: int, tokens: int, free: int = 0) -> int:
        """Return the size of the activations of ``tokens`` from ``start``, except for ``free`` of
        them, and of all their attention scores."""
        activations = max(0, tokens - free) * self._config.pass_token_bytes
        return activations + self._scores_bytes(start, tokens)

    def _scores_bytes(self, start: int, tokens: int) -> int:
        return tokens * (start + tokens) * self._config.score_bytes

    def _pages_for_chunk(self, seq: Sequence, tokens: int) -> int:
        """Return how many of the next ``tokens`` of ``seq`` it has pages for now."""
        start, wanted = seq.num_computed_tokens, tokens
        while tokens and not self._memory.grow(seq, start + tokens):
            self._lacking = seq, start + tokens
            tokens = 0
            if not self._config.whole_picture_tokens:
                tokens = max(min(wanted // 2, seq.capacity - start), 0)
            wanted = tokens
        if tokens:
            self._lacking = None
        return tokens

    def _with_whole_pictures(self, seq: Sequence, tokens: int, reserved: int) -> tuple[int, int]:
        """Return the length of the next chunk of ``seq``, adjusted so that no picture is divided
        if it must not be, and how many bytes are reserved.

        Such a picture is computed at once, even if there is no room for more tokens."""
        start = seq.num_computed_tokens
        whole = self._whole_pictures.chunk_end(seq, start + tokens) - start
        more = whole - tokens
        size = self._pass_bytes(start + tokens, more)
        if more > 0 and self._memory.reserve_pass(size):
            reserved += size
        return whole, reserved

    # -- going on ------------------------------------------------------------------

    def _advance(self, one: OpenPass, builder: PlanBuilder, *, streaming: bool) -> None:
        """Plan the next layers of ``one``, and the operations that follow the last layer."""
        layers = self._config.layers
        self._layer_s = self._chunk_policy.predict_layer_s(one.sizes)
        seconds = self._seconds_now(streaming=streaming)
        count = max(1, min(round(seconds / self._layer_s), layers - one.layers_done))
        self._stretch_s = count * self._layer_s
        builder.stretch(one, count, layers, self._stretch_s if streaming else None)
        if streaming:
            self._time_share.planned(self._stretch_s)
        if one.layers_done < layers:
            return
        self.passes.forget(one)
        for seq, _, end in one.chunks:
            if seq.status is not Status.PREFILLING:
                continue
            seq.advance(end)
            if end == seq.prefill_end:
                self._sequences.set_status(seq, Status.READY)

    def _seconds_now(self, *, streaming: bool) -> float:
        """Return how many seconds this plan may compute without a break."""
        seconds = self._chunk_policy.unit_s(streaming=streaming)
        if not streaming:
            return seconds
        available_s = self._time_share.available_s
        return available_s if self._config.look_ahead else min(seconds, available_s)

    def _encode(
        self,
        picture: SequencePicture,
        seq: Sequence,
        builder: PlanBuilder,
        *,
        streaming: bool,
        kept: Collection[bytes] = (),
    ) -> None:
        """Plan the next layers of the encoding of ``picture``, which ``seq`` needs next. Pictures
        in ``kept`` stay, and those that ``seq`` needs before."""
        start, end = seq.num_computed_tokens, picture.end
        before = {one.digest for one in seq.pictures if start < one.end and one.start < end}
        seq.num_encoded += self.pictures.begin(picture, before.union(kept))
        self._layer_s = self.pictures.layer_s(picture)
        seconds = self._seconds_now(streaming=streaming)
        count = max(1, round(seconds / self._layer_s)) if self._layer_s else 1
        op = self.pictures.encode(picture, count)
        self._stretch_s = op.layers * self._layer_s
        size_bytes = picture.size_bytes * op.layers / self._config.picture_layers
        charged_s = self._stretch_s if streaming else None
        builder.encode(op, PlannedEncoding(size_bytes, op.is_last, charged_s))
        if streaming:
            self._time_share.planned(self._stretch_s)

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
        passes = self.passes
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


def _tokens_left(seq: Sequence) -> int:
    return seq.prefill_end - seq.num_computed_tokens
