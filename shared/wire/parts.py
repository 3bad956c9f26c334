"""Structs that messages contain."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator
from typing import Any, Literal

import msgspec

Phase = Literal["loading", "warming", "ready", "draining"]
StoreState = Literal["ok", "full", "read_only", "failing", "gone"]
FinishReason = Literal["stop", "length", "abort", "error"]
Task = Literal["generate", "embed", "rerank"]
"""The task of a model: continue texts, give each text a vector, or give each pair of texts a score.
"""

BACKGROUND_PRIORITY = -(2**31) - 1
"""The priority of batches, below any that a client may ask for. An engine gives their rows and
slots to other requests on demand. Older engines treat it as the lowest priority.
"""
MAX_GRAMMAR_BYTES = 256 * 1024
"""Max size of the source of one grammar, in UTF-8."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How the tokens of one sequence are sampled."""

    # The noise of a token depends only on (seed, absolute output position). The router draws a seed
    # if the client gives none, so that a resumed sequence continues as it would have.
    seed: int
    temperature: float = 0.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: all tokens
    min_p: float = 0.0
    # XTC drops, with probability `xtc_probability`, all tokens more likely than `xtc_threshold`
    # except the least likely of them. It never drops those of `xtc_special_ids`.
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    xtc_special_ids: list[int] = []
    repetition_penalty: float = 1.0  # 0 and 1: none
    repetition_context_size: int = 20  # number of last tokens of prompt and output; 0: all of them
    presence_penalty: float = 0.0  # over the whole output
    frequency_penalty: float = 0.0  # over the whole output
    logit_bias: list[tuple[int, float]] = []  # pairs of a token and the value added to its logit

    @property
    def has_repetition_penalty(self) -> bool:
        return self.repetition_penalty not in (0.0, 1.0)

    @property
    def has_output_penalties(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty)

    @property
    def needs_history(self) -> bool:
        """Whether sampling a token needs the tokens before it."""
        return self.has_repetition_penalty or self.has_output_penalties


class Grammar(msgspec.Struct, frozen=True, kw_only=True):
    """The required form of an answer's text, in llguidance's terms."""

    kind: Literal["json_schema", "regex", "lark"]
    # A JSON schema (as JSON), a regular expression or a Lark grammar, up to `MAX_GRAMMAR_BYTES`.
    source: str
    # The grammar applies from the first output token, or after the first occurrence of these tokens
    # (the end of a model's reasoning).
    after: list[int] = []
    param: str | None = None  # the request field that a refusal names
    # Grammars of the request from which ``source`` was made. Each is compiled separately first, so
    # that an error names the one that is invalid.
    parts: list[Grammar] = []


class ThinkingBudget(msgspec.Struct, frozen=True, kw_only=True):
    """How long a model may reason before the end of its reasoning is forced."""

    tokens: int
    end_ids: list[int]  # the tokens that end reasoning; at least one
    start_ids: list[int] = []  # the tokens that begin it in the output; none: nothing does
    is_open: bool = False  # the prompt ends inside reasoning


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts and timings of one sequence."""

    prompt_tokens: int
    completion_tokens: int
    cached_ram_tokens: int = 0
    cached_ssd_tokens: int = 0
    # Drafted tokens of the request's `prediction`: accepted ones, and rejected ones.
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0


class TokenLogprobs(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Log-probabilities at one position, from the model's own distribution: before temperature,
    penalties and every other control. Not tracked by the garbage collector: an answer may have a
    hundred thousand of them.
    """

    chosen: float
    top_ids: tuple[int, ...] = ()  # most likely first, or those of `Submit.logprob_token_ids`
    top: tuple[float, ...] = ()  # parallel to `top_ids`


class PackedLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """The `TokenLogprobs` of successive positions, each with as many alternatives.

    They are packed in three arrays, little-endian: a prompt has thousands of positions, and that
    many objects would block the receiver's event loop while they are decoded and in each garbage
    collection.
    """

    chosen: bytes  # float32, one per position
    top_ids: bytes  # int32, grouped by position
    top: bytes  # float32, parallel to `top_ids`

    def __post_init__(self) -> None:
        positions, rest = divmod(len(self.chosen), 4)
        ragged = len(self.top) % (4 * positions) if positions else len(self.top)
        if rest or ragged or len(self.top) != len(self.top_ids):
            raise ValueError("log-probabilities and positions do not match")

    def __len__(self) -> int:
        return len(self.chosen) // 4

    def __iter__(self) -> Iterator[TokenLogprobs]:
        chosen, top = _unpack("f", self.chosen), _unpack("f", self.top)
        top_ids = _unpack("i", self.top_ids)
        width = len(top) // max(1, len(chosen))
        for position, own in enumerate(chosen):
            some = slice(position * width, (position + 1) * width)
            yield TokenLogprobs(chosen=own, top_ids=tuple(top_ids[some]), top=tuple(top[some]))

    def after(self, count: int) -> PackedLogprobs:
        """Return all but the first ``count`` positions."""
        bytes_each = len(self.top) // max(1, len(self))
        return PackedLogprobs(
            chosen=self.chosen[4 * count :],
            top_ids=self.top_ids[bytes_each * count :],
            top=self.top[bytes_each * count :],
        )


def _unpack(code: str, data: bytes) -> array[Any]:
    values = array(code, data)
    if sys.byteorder == "big":
        values.byteswap()
    return values


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one step for one sequence."""

    request_id: str
    attempt: int
    index: int  # output position of the first of `token_ids`
    token_ids: list[int]  # includes the token that ended the sequence, which usage counts too
    logprobs: list[TokenLogprobs] | None = None  # parallel to `token_ids`, if requested
    # The next ones of the prompt, starting with its second token; complete before the first output
    # token.
    prompt_logprobs: PackedLogprobs | None = None
    finish: FinishReason | None = None
    stop_token: int | None = None  # the last of `token_ids`, if it is a stop token (not text)
    error: str | None = None
    param: str | None = None  # the field of the request that caused the error; None: none did
    # Running counts: in the last delta of an attempt, in the first with tokens, and after drafts.
    usage: Usage | None = None


class LiveRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A sequence that an engine holds, as listed in a `Heartbeat`."""

    request_id: str
    attempt: int
    generated: int  # number of output tokens
    accepted: bool = True  # False while the grammar is compiled
    # Prompt tokens whose keys and values are computed or in progress; None: unknown.
    computed_prompt_tokens: int | None = None
    cached_prompt_tokens: int | None = None  # of these, the ones found in a cache


class TextTask(msgspec.Struct, frozen=True, kw_only=True):
    """How a router prepares texts for an embedding or reranking model."""

    dimensions: int = 0  # size of a vector; 0 for a reranking model
    # Prefixes that a checkpoint defines for texts, by name ("query").
    prompts: dict[str, str] = {}
    default_prompt: str | None = None  # the name of the prefix used by default
    # A prompt with {instruction}, {query} and {document}; empty: the tokenizer joins the pair.
    pair_template: str = ""
    instruction: str = ""  # used in the template if a request gives none


class DraftCounts(msgspec.Struct, frozen=True):
    """Drafts from one source."""

    proposals: int = 0  # runs of draft tokens that were verified
    drafted: int = 0  # tokens
    accepted: int = 0  # tokens
    saved_s: float = 0.0  # decode time saved, as far as the time of a step without drafts is known
    spent_s: float = 0.0  # time until the drafts were ready; subtracted from saved_s


class DraftStats(msgspec.Struct, frozen=True, kw_only=True):
    """Totals of an engine's speculation since its start, and its estimates."""

    sources: dict[str, DraftCounts] = {}
    # Current acceptance rate of drafts, by source and kind of proposal.
    rates: dict[str, float] = {}
    step_s: dict[
        str, float
    ] = {}  # seconds of a decode step, by the number of tokens that it computes


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Gauges and counters of one engine, at the time of the heartbeat that carries them.

    Counters (``*_total``) count from the start of the engine process.
    """

    running: int = 0
    waiting: int = 0
    total_blocks: int = 0
    used_blocks: int = 0
    free_blocks: int = 0
    limit_bytes: int = 0  # in the ledger
    unevictable_bytes: int = 0  # in the ledger: held by running sequences
    active_memory_bytes: int = 0
    kept_states: int = 0
    adapters_loaded: int = 0  # adapters in memory
    adapter_swaps_total: int = 0  # adapters that replaced another one in memory
    open_passes: int = 0  # prefill passes that have begun and have layers left to compute
    steps_total: int = 0
    step_seconds_total: float = 0.0
    schedule_seconds_total: float = 0.0
    build_seconds_total: float = 0.0
    sample_seconds_total: float = 0.0
    emit_seconds_total: float = 0.0
    batch_rows_total: int = 0
    prompt_tokens_total: int = 0
    prefill_tokens_total: int = 0
    prefill_passes_total: int = 0  # prefill passes that are complete
    prefill_stretches_total: int = 0  # parts into which prefill passes were divided
    cached_ram_tokens_total: int = 0
    cached_ssd_tokens_total: int = 0
    generated_tokens_total: int = 0
    preemptions_total: int = 0
    aborts_total: int = 0
    image_bytes: int = 0  # cached embeddings of pictures
    images_total: int = 0  # pictures in prompts
    image_hits_total: int = 0  # of these, those not encoded for their request
    encoded_images_total: int = 0
    encode_seconds_total: float = 0.0
    drafts: DraftStats | None = None  # None without speculation
    texts_total: int = 0  # requested from an embedding or reranking model
    shared_texts_total: int = 0  # of these, equal to one that was already in flight
    dropped_messages_total: int = 0
    store_reads_total: int = 0
    store_writes_total: int = 0
    store_drops_total: int = 0
    store_corrupt_total: int = 0
    store_read_bytes_total: int = 0
    store_written_bytes_total: int = 0


class StoreStats(msgspec.Struct, frozen=True, kw_only=True):
    """Gauges and counters of the kvstore (`StoreStatsReply`). Engines forward them in
    heartbeats.
    """

    blocks: int = 0
    bytes: int = 0
    limit_bytes: int = 0
    indexing: bool = False  # the index is being rebuilt
    is_clearing: bool = False  # blocks of a cleared namespace are being removed
    state: StoreState = "ok"  # otherwise nothing is written until the disk works again
    disk_errors_total: int = 0
    reads_total: int = 0
    writes_total: int = 0
    misses_total: int = 0
    drops_total: int = 0
    corrupt_total: int = 0
    evicted_total: int = 0
    expired_total: int = 0
    dropped_messages_total: int = 0
