"""The messages that router, engine and kvstore exchange over ZeroMQ.

A message is multipart. Frame 0 is a msgpack map with the key ``type`` (the
struct's tag) and the struct's fields; further frames are raw bytes that the
struct describes (files, block payloads). Unknown fields are ignored, so that a
newer peer can add some; a message that cannot be decoded raises `WireError`,
which receivers count, log and drop.

Durations travel in seconds, never wall-clock times. Hashes travel as raw bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgpack
import msgspec

PROTOCOL_VERSION = 1
SPOKEN_VERSIONS = (1,)
"""Versions this release understands: its own, and one back once there is one."""

MAX_HEADER_BYTES = 16 * 1024 * 1024
MAX_FRAMES = 4096
MAX_GRAMMAR_BYTES = 256 * 1024
"""Of the source of one grammar, in UTF-8."""

Phase = Literal["loading", "warming", "ready", "draining"]
FinishReason = Literal["stop", "length", "abort", "error"]
RefusalReason = Literal["invalid", "too_large", "unsupported", "full", "draining"]

TOKENIZER_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
"""The only names a router asks an engine for, and the only ones an engine gives."""


class WireError(Exception):
    """A message that does not decode: wrong framing, type or field."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """Base of everything that is sent."""


# -- parts of messages ---------------------------------------------------------


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How the tokens of one request are chosen.

    ``seed`` is always set: the router draws one where the client gives none, so
    that a resumed request goes on as it would have. Each token's noise depends on
    (seed, absolute output position) alone. ``temperature`` 0 is greedy.

    XTC leaves out all but the least likely of the tokens that are over
    ``xtc_threshold``, with ``xtc_probability``, never those of ``xtc_special_ids``.
    ``repetition_penalty`` (0 and 1 are none) looks at the last
    ``repetition_context_size`` tokens of prompt and output (0: at all of them),
    ``presence_penalty`` and ``frequency_penalty`` at all of the output.
    ``logit_bias`` are pairs of a token and what is added to its logit.
    """

    seed: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    xtc_special_ids: list[int] = []
    repetition_penalty: float = 1.0
    repetition_context_size: int = 20
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: list[tuple[int, float]] = []

    @property
    def repeats_cost(self) -> bool:
        return self.repetition_penalty not in (0.0, 1.0)

    @property
    def outputs_cost(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty)

    @property
    def looks_back(self) -> bool:
        """Whether choosing a token needs the ones before it."""
        return self.repeats_cost or self.outputs_cost


class Grammar(msgspec.Struct, frozen=True, kw_only=True):
    """What the text of an answer must be, in llguidance's terms.

    ``source`` is a JSON schema (as JSON), a regular expression, or a Lark grammar, of at most
    `MAX_GRAMMAR_BYTES`. It binds from the first output on, or from behind the first place
    where the tokens ``after`` came (the end of a model's reasoning). ``param`` is the field of
    the request to be named in a refusal.
    """

    kind: Literal["json_schema", "regex", "lark"]
    source: str
    after: list[int] = []
    param: str | None = None


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts of one finished request, and where its time went (seconds)."""

    prompt_tokens: int
    completion_tokens: int
    cached_ram_tokens: int = 0
    cached_ssd_tokens: int = 0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0


class TokenLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Log-probabilities of one position, of the model's own distribution: before
    temperature, penalties and every other control.

    ``top_ids`` and ``top`` run in parallel, most likely first.
    """

    chosen: float
    top_ids: list[int] = []
    top: list[float] = []


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """What one sequence gained in a step.

    ``index`` is the output position of the first of ``token_ids``. The token that
    ended the sequence is among ``token_ids`` and counts in the usage; when it is a
    stop token (and so no text) it is repeated in ``stop_token``. The first delta of an
    attempt that has tokens and the last have the ``usage`` so far. ``logprobs`` run
    parallel to ``token_ids``, where they are asked for. ``prompt_logprobs`` are the next
    ones of the prompt, from its second token on; they are complete before the first output.
    """

    request_id: str
    attempt: int
    index: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    finish: FinishReason | None = None
    stop_token: int | None = None
    error: str | None = None
    usage: Usage | None = None


class LiveRequest(msgspec.Struct, frozen=True, kw_only=True):
    """``accepted`` is False while its grammar is being compiled."""

    request_id: str
    attempt: int
    generated: int
    accepted: bool = True


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """One engine's gauges and counters, as of the beat that carries them.

    Counters (``*_total``) count from the start of the engine process. Bytes are
    the ledger's. ``unevictable_bytes`` is what running sequences hold.
    """

    running: int = 0
    waiting: int = 0
    total_blocks: int = 0
    used_blocks: int = 0
    free_blocks: int = 0
    limit_bytes: int = 0
    unevictable_bytes: int = 0
    active_memory_bytes: int = 0
    kept_states: int = 0
    steps_total: int = 0
    step_seconds_total: float = 0.0
    schedule_seconds_total: float = 0.0
    build_seconds_total: float = 0.0
    sample_seconds_total: float = 0.0
    emit_seconds_total: float = 0.0
    batch_rows_total: int = 0
    prompt_tokens_total: int = 0
    prefill_tokens_total: int = 0
    cached_ram_tokens_total: int = 0
    cached_ssd_tokens_total: int = 0
    generated_tokens_total: int = 0
    preemptions_total: int = 0
    aborts_total: int = 0
    dropped_messages_total: int = 0
    store_reads_total: int = 0
    store_writes_total: int = 0
    store_drops_total: int = 0
    store_corrupt_total: int = 0
    store_read_bytes_total: int = 0
    store_written_bytes_total: int = 0


class StoreStats(msgspec.Struct, frozen=True, kw_only=True):
    """The kvstore's own figures (`StoreStatsReply`); engines pass them on in beats."""

    blocks: int = 0
    bytes: int = 0
    limit_bytes: int = 0
    indexing: bool = False
    reads_total: int = 0
    writes_total: int = 0
    misses_total: int = 0
    drops_total: int = 0
    corrupt_total: int = 0
    evicted_total: int = 0
    expired_total: int = 0
    dropped_messages_total: int = 0


# -- router -> engine ----------------------------------------------------------


class Ping(Message, frozen=True, tag="ping"):
    """Asks for a `Hello`. An engine that sees a new ``router_id`` drops every
    request of the old one: that router is gone, and its clients with it."""

    router_id: str
    protocol: int = PROTOCOL_VERSION


class Submit(Message, frozen=True, tag="submit"):
    """One sequence to generate.

    ``generated`` are the tokens an earlier attempt produced; they count against
    ``max_tokens`` and are not sent again. ``stop_token_ids`` holds the EOS tokens
    too. A higher ``priority`` goes first. ``logprobs`` is the number of
    alternatives to report, None for no log-probabilities; ``prompt_logprobs`` the same
    for the prompt, which then is computed whatever is cached of it. A request with a
    ``grammar`` is accepted once that has been compiled.
    """

    request_id: str
    attempt: int
    token_ids: list[int]
    sampling: Sampling
    max_tokens: int
    stop_token_ids: list[int]
    min_tokens: int = 0
    generated: list[int] = []
    cache_salt: str = ""
    priority: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None


class Abort(Message, frozen=True, tag="abort"):
    """Frees the request at the next step. ``attempt`` None means any."""

    request_id: str
    attempt: int | None = None


class Drain(Message, frozen=True, tag="drain"):
    """The engine finishes what it has, refuses what comes, and says `Bye`."""


class FilesWanted(Message, frozen=True, tag="files_wanted"):
    """Names out of `TOKENIZER_FILES` whose digests the router does not have."""

    names: list[str]


# -- engine -> router ----------------------------------------------------------


class Hello(Message, frozen=True, tag="hello"):
    """An engine introduces itself, once per `Ping` from a router it does not know.

    ``engine`` is its stable name, ``incarnation`` differs after each start: a
    router that sees a new incarnation knows that the old one's requests are lost.
    ``namespace`` is the root of its block hashes (see `shared.hashing`).
    ``files`` maps a tokenizer file's name to the hex SHA-256 of its content.
    ``max_sequences`` is how many requests it takes at once.
    """

    protocol: int
    engine: str
    incarnation: str
    model: str
    aliases: list[str]
    fingerprint: str
    context_length: int
    vocab_size: int
    block_size: int
    total_blocks: int
    max_sequences: int
    max_batch_size: int
    namespace: bytes
    eos_token_ids: list[int]
    files: dict[str, str]
    capabilities: list[str] = []
    kv_bits: int = 16
    version: str = ""


class Beat(Message, frozen=True, tag="beat"):
    """Sent by the engine's IO thread, also while the main thread computes.

    ``stalled_s`` is the time since the engine last computed a token while it had
    requests, 0 when idle. ``phase_s`` is the time in the present phase.
    """

    engine: str
    incarnation: str
    number: int
    phase: Phase
    phase_s: float
    stalled_s: float
    live: list[LiveRequest]
    stats: EngineStats
    store: StoreStats | None = None


class Accepted(Message, frozen=True, tag="accepted"):
    request_id: str
    attempt: int


class Refused(Message, frozen=True, tag="refused"):
    """``invalid``, ``too_large`` and ``unsupported`` are the request's own fault
    (400, ``param`` names the field); ``full`` and ``draining`` are not: the router
    places it elsewhere or waits."""

    request_id: str
    attempt: int
    reason: RefusalReason
    message: str
    param: str | None = None


class Tokens(Message, frozen=True, tag="tokens"):
    """One message a step, for all sequences that moved."""

    deltas: list[Delta]


class CacheEvents(Message, frozen=True, tag="cache_events"):
    """Changes of the set of block hashes in RAM. ``number`` rises by one; after a
    gap, or when ``snapshot`` is set, ``added`` is the whole set."""

    number: int
    added: list[bytes]
    removed: list[bytes]
    snapshot: bool = False


class Files(Message, frozen=True, tag="files"):
    """The answer to `FilesWanted`: one raw frame per name, in order."""

    names: list[str]


class Bye(Message, frozen=True, tag="bye"):
    engine: str
    incarnation: str


# -- engine -> kvstore ---------------------------------------------------------


class Locate(Message, frozen=True, tag="locate"):
    """Proof that both see one file system: the kvstore answers with the path of a
    nonce file, the engine reads it and says what it found (`Located`)."""

    protocol: int = PROTOCOL_VERSION


class Located(Message, frozen=True, tag="located"):
    """``nonce`` as read from the file; right means that `Get` answers with paths."""

    nonce: str


class Has(Message, frozen=True, tag="has"):
    """How many of ``hashes``, counted from the first, are there without a gap."""

    ticket: int
    namespace: str
    hashes: list[bytes]


class Get(Message, frozen=True, tag="get"):
    """The blocks of ``hashes`` up to the first that is missing."""

    ticket: int
    namespace: str
    hashes: list[bytes]


class Put(Message, frozen=True, tag="put"):
    """Stores one block; the frame is a whole block file (see `shared.blockfile`)."""

    ticket: int
    namespace: str
    hash: bytes


class Touch(Message, frozen=True, tag="touch"):
    """These blocks were used: refreshes their age. No answer."""

    namespace: str
    hashes: list[bytes]


class Corrupt(Message, frozen=True, tag="corrupt"):
    """The engine read this block from its path and it was bad. No answer."""

    namespace: str
    hash: bytes


class StoreStatsWanted(Message, frozen=True, tag="store_stats_wanted"):
    pass


# -- kvstore -> engine ---------------------------------------------------------


class Nonce(Message, frozen=True, tag="nonce"):
    path: str


class HasReply(Message, frozen=True, tag="has_reply"):
    ticket: int
    count: int


class GetReply(Message, frozen=True, tag="get_reply"):
    """Either ``paths`` (one per block found), or one raw frame per block."""

    ticket: int
    count: int
    paths: list[str] | None = None


class PutReply(Message, frozen=True, tag="put_reply"):
    """``stored`` False: dropped, because the writer is behind or the disk is full."""

    ticket: int
    stored: bool
    reason: str = ""


class StoreStatsReply(Message, frozen=True, tag="store_stats"):
    stats: StoreStats


ToEngine = Ping | Submit | Abort | Drain | FilesWanted
ToRouter = Hello | Beat | Accepted | Refused | Tokens | CacheEvents | Files | Bye
ToStore = Locate | Located | Has | Get | Put | Touch | Corrupt | StoreStatsWanted
FromStore = Nonce | HasReply | GetReply | PutReply | StoreStatsReply


def encode(message: Message, *payload: bytes | memoryview) -> list[bytes | memoryview]:
    """The frames of ``message``: its header, then ``payload`` as it is."""
    header = msgpack.packb(msgspec.to_builtins(message, builtin_types=(bytes,)))
    return [header, *payload]


def decode(frames: Sequence[bytes | memoryview], expected: Any) -> tuple[Any, list[bytes]]:
    """The message in ``frames`` and its raw frames.

    ``expected`` is a union of message types (`ToEngine`, ...): anything else, and
    anything malformed, raises `WireError`.
    """
    if not frames:
        raise WireError("a message without frames")
    if len(frames) > MAX_FRAMES:
        raise WireError(f"{len(frames)} frames, over the limit of {MAX_FRAMES}")
    if len(frames[0]) > MAX_HEADER_BYTES:
        raise WireError(f"a header of {len(frames[0])} bytes, over {MAX_HEADER_BYTES}")
    try:
        fields = msgpack.unpackb(frames[0], strict_map_key=True)
        message = msgspec.convert(fields, expected)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise WireError(f"{type(error).__name__}: {error}") from error
    return message, [bytes(frame) for frame in frames[1:]]
