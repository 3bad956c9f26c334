"""Decides which prompts are computed in a plan: passes of chunks, one stretch of layers at a
time."""

from __future__ import annotations

import logging
from collections.abc import Collection
from collections.abc import Sequence as SequenceOf

from engine.scheduler.config import SchedulerConfig
from engine.scheduler.memory import Memory
from engine.scheduler.planning.passes import OpenPass, OpenPasses, PlannedChunk
from engine.scheduler.planning.pictures import PictureGroup, PictureTable, WholePictures
from engine.scheduler.planning.plan_builder import PlanBuilder, PlannedEncoding
from engine.scheduler.planning.prefix_cache import PrefixCache
from engine.scheduler.sequences.sequence import Sequence, SequencePicture, Status
from engine.scheduler.sequences.sequence_table import SequenceTable
from engine.scheduler.timing.chunks import MIN_TOKENS, ChunkPolicy
from engine.scheduler.timing.time_share import MUCH_SHORTER, Lead, TimeShare

logger = logging.getLogger(__name__)

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


class Prefilling:
    """Plans the passes of prompts. A plan contains at most one stretch of one pass.

    The oldest prompt comes first, so that streams start one after the other. A much shorter
    prompt overtakes it between two layers of its pass."""

    def __init__(
        self,
        config: SchedulerConfig,
        sequences: SequenceTable,
        memory: Memory,
        prefix_cache: PrefixCache,
        chunk_policy: ChunkPolicy,
        time_share: TimeShare,
    ) -> None:
        self._config = config
        self._sequences = sequences
        self._memory = memory
        self._snapshot_policy = prefix_cache.snapshot_policy
        self._chunk_policy = chunk_policy
        self._time_share = time_share
        self.passes = OpenPasses(memory)
        self.pictures = PictureTable(config)
        self._group = PictureGroup(self.pictures)
        self._whole_pictures = WholePictures(config)
        self.lacking: tuple[Sequence, int] | None = None
        """A prompt that found no page in the last plan, and the length for which it needs them."""
        self._lead = Lead()
        self._layer_s = 0.0
        """Predicted time of one layer of the last stretch."""
        self._stretch_s = 0.0

    @property
    def has_turn(self) -> bool:
        """Whether prompts are due, although streams run too."""
        return self._time_share.is_turn_of_prompts(self._layer_s)

    @property
    def is_within_share(self) -> bool:
        """Whether prompts have taken at most their share of the streams' time. Short ends then join
        the next decode: it takes little longer, and their first tokens come a step sooner."""
        return self._time_share.owed_s >= 0

    def clear(self) -> None:
        """Forget passes and pictures, because the executor has lost them."""
        self.lacking = None
        self.passes.clear()
        self.pictures.clear()

    def plan(self, builder: PlanBuilder, *, streaming: bool) -> None:
        """Add a stretch of a pass to ``builder``, if there are prompts to compute."""
        prefilling = self._sequences.ordered(Status.PREFILLING)
        limits = self._snapshot_policy.prefill_limits(prefilling)
        candidates = [
            seq
            for seq in prefilling
            if not seq.is_restoring and (seq in limits or self.passes.of(seq) is not None)
        ]
        claimed = self.claimed()
        while candidates:
            seq = self._first(candidates)
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

    def join_decode(self, builder: PlanBuilder, *, streaming: bool) -> bool:
        """Let the decode of this plan compute the ends of prompts that come before others: all, or
        as many as fit if ``streaming`` (others wait for their next token). Return whether there
        are any. A pass of their own would read the weights once more."""
        if not self._config.decodes_ends:
            return False
        table = self._sequences
        prefilling = [seq for seq in table.ordered(Status.PREFILLING) if not seq.is_restoring]
        candidates = [seq for seq in prefilling if self._is_decodable_end(seq)]
        rows = self._config.max_batch_size - table.count(Status.READY, Status.DECODING)
        if not candidates or not self._is_decodable_end(self._first(prefilling)):
            return False
        claimed = self.claimed()
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
            builder.step.ends_owing_s = self._stretch_s
            self._time_share.planned(self._stretch_s)
        return True

    def _is_decodable_end(self, seq: Sequence) -> bool:
        """Return whether a decode may compute the rest of the prompt of ``seq``."""
        is_simple = not (seq.pictures or seq.needs_prompt_logprobs)
        is_open = self.passes.of(seq) is not None
        most = min(MAX_END_TOKENS, self._config.prefill_chunk_tokens or MAX_END_TOKENS)
        return is_simple and not is_open and 0 < _tokens_left(seq) <= most

    def _first(self, candidates: SequenceOf[Sequence]) -> Sequence:
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

    def claimed(self) -> dict[bytes, int]:
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
            is_counted = not _is_short_end(seq)
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
                tokens, reserved = self._within_memory(start, self._with_pages(seq, tokens))
                tokens, reserved = self._with_whole_pictures(seq, tokens, reserved)
                if not (tokens and self._with_pages(seq, tokens) == tokens):
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

    def _with_pages(self, seq: Sequence, tokens: int) -> int:
        """Return how many of the next ``tokens`` of ``seq`` it has pages for now."""
        start, wanted = seq.num_computed_tokens, tokens
        while tokens and not self._memory.grow(seq, start + tokens):
            self.lacking = seq, start + tokens
            tokens = 0
            if not self._config.whole_picture_tokens:
                tokens = max(min(wanted // 2, seq.capacity - start), 0)
            wanted = tokens
        if tokens:
            self.lacking = None
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
        if one.layers_done == layers:
            self._complete(one)

    def _seconds_now(self, *, streaming: bool) -> float:
        """Return how many seconds this plan may compute without a break."""
        seconds = self._chunk_policy.unit_s(streaming=streaming)
        if not streaming:
            return seconds
        owed_s = self._time_share.owed_s
        return owed_s if self._config.look_ahead else min(seconds, owed_s)

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
        owing_s = self._stretch_s if streaming else None
        builder.encode(op, PlannedEncoding(size_bytes, op.is_last, owing_s))
        if streaming:
            self._time_share.planned(self._stretch_s)

    def _complete(self, one: OpenPass) -> None:
        self.passes.forget(one)
        for seq, _, end in one.chunks:
            if seq.status is not Status.PREFILLING:
                continue
            seq.advance(end)
            if end == seq.prefill_end:
                self._sequences.set_status(seq, Status.READY)


def _tokens_left(seq: Sequence) -> int:
    return seq.prefill_end - seq.num_computed_tokens


def _is_short_end(seq: Sequence) -> bool:
    return seq.num_computed_tokens > 0 and _tokens_left(seq) <= MAX_END_TOKENS
