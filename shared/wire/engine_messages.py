"""The messages between router and engine."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from shared.wire.adapters import AdapterChecked, AdapterDecisions, AdapterRef, CheckAdapter
from shared.wire.codec import PROTOCOL_VERSION, Message
from shared.wire.images import PROCESSOR_FILES, ImagePart, Vision
from shared.wire.parts import (
    BACKGROUND_PRIORITY,
    Delta,
    EngineStats,
    Grammar,
    LiveRequest,
    Phase,
    SamplingParams,
    StoreStats,
    Task,
    TextTask,
    ThinkingBudget,
)

RefusalReason = Literal["invalid", "too_large", "unsupported", "full", "draining"]

TENSOR_PARALLEL = "tensor-parallel"
"""The capability of an engine of several ranks."""

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
    "vocab.txt",
    *PROCESSOR_FILES,
)
"""The only files that a router requests from an engine, and the only ones that an engine sends."""


# -- router -> engine ----------------------------------------------------------


class Ping(Message, frozen=True, tag="ping"):
    """Ask for a `Hello`."""

    # An engine that receives a new id drops every request of the previous router: that router is
    # gone, and its clients with it.
    router_id: str
    protocol: int = PROTOCOL_VERSION


class Submit(Message, frozen=True, tag="submit"):
    """One sequence to generate."""

    request_id: str
    attempt: int
    token_ids: list[int]
    sampling: SamplingParams
    max_tokens: int
    stop_token_ids: list[int]  # including the EOS tokens
    min_tokens: int = 0
    # Tokens of an earlier attempt. They count against `max_tokens` and are not sent again.
    generated: list[int] = msgspec.field(default_factory=list)
    cache_salt: str = ""
    priority: int = 0  # higher goes first
    logprobs: int | None = None  # alternatives to report; None: no log-probabilities
    # The same for the prompt, which is then computed even if its blocks are cached.
    prompt_logprobs: int | None = None
    # Tokens whose log-probabilities are reported in place of the most likely ones', in this order.
    # Only with ``logprobs``.
    logprob_token_ids: tuple[int, ...] = ()
    grammar: Grammar | None = None  # the request is accepted once the grammar is compiled
    thinking: ThinkingBudget | None = None
    prediction: tuple[
        int, ...
    ] = ()  # text that the answer may repeat; it does not change the answer
    # Pictures in the prompt, in order. A raw frame follows for each of their arrays.
    images: tuple[ImagePart, ...] = ()
    traceparent: str = ""  # the W3C traceparent of its span; empty: not traced
    adapter: AdapterRef | None = None  # the adapter that the request names
    group: str = ""  # the tenant whose request it is: tenants share what compiles grammars fairly

    @property
    def adapter_digest(self) -> str:
        """The digest of the adapter's content; empty without an adapter."""
        return "" if self.adapter is None else self.adapter.digest

    @property
    def is_background(self) -> bool:
        """Whether it belongs to a batch: it gives way to all other requests."""
        return self.priority <= BACKGROUND_PRIORITY

    @property
    def waiting(self) -> LiveRequest:
        """The request as heartbeats list it until the scheduler has accepted it."""
        return LiveRequest(
            request_id=self.request_id,
            attempt=self.attempt,
            generated=len(self.generated),
            accepted=False,
        )


class Encode(Message, frozen=True, tag="encode"):
    """Texts to embed, or pairs to score. Each is one row of `Encoded`."""

    request_id: str
    attempt: int
    token_ids: list[list[int]]
    # For pairs, the position in each of `token_ids` where the second text begins; empty: not pairs.
    second_starts: list[int] = msgspec.field(default_factory=list)
    group: str = ""  # the tenant that owns these texts: tenants share the engine fairly
    priority: int = 0  # higher goes first
    traceparent: str = ""  # as in `Submit`


class Abort(Message, frozen=True, tag="abort"):
    """Free the request at the next step."""

    request_id: str
    attempt: int | None = None  # None: any


class Drain(Message, frozen=True, tag="drain"):
    """Finish the current requests, refuse new ones, then send `Bye`."""


class ClearCache(Message, frozen=True, tag="clear_cache"):
    """Drop the cached prefixes that are not in use."""

    ssd: bool = False  # also those in the kvstore


class FilesWanted(Message, frozen=True, tag="files_wanted"):
    """Request the files whose digests the router does not have."""

    names: list[str]  # from `TOKENIZER_FILES`


# -- engine -> router ----------------------------------------------------------


class Hello(Message, frozen=True, tag="hello"):
    """The introduction of an engine, sent once per `Ping` from an unknown router."""

    protocol: int
    engine: str  # the name, which stays the same after a restart
    # Different after each start. A new one tells the router that the old one's requests are lost.
    incarnation: str
    model: str
    aliases: list[str]
    fingerprint: str
    context_length: int
    vocab_size: int
    block_size: int
    total_blocks: int
    max_sequences: int  # max requests at once
    max_batch_size: int
    namespace: bytes  # the root of its block hashes (see `shared.hashing`)
    eos_token_ids: list[int]
    files: dict[str, str]  # name of a tokenizer file -> hex SHA-256 of its content
    capabilities: list[str] = msgspec.field(default_factory=list)
    parameters: int = 0  # of the whole model, not of a rank; 0: unknown
    weights_bytes: int = 0  # on disk
    kv_bits: int = 16
    attends_by: str = ""  # how attention reads KV on a GPU: by kernels of our own or by gathering
    version: str = ""
    # Settings of this model that the router needs, such as its template and limits; for all others,
    # the router uses its own (see `shared.settings.serving_options`).
    options: dict[str, Any] = msgspec.field(default_factory=dict)
    task: Task = "generate"
    text_task: TextTask | None = None  # for a model with a task other than generating text
    vision: Vision | None = None  # None: it accepts no pictures
    adapters: list[AdapterRef] = msgspec.field(default_factory=list)  # those in its settings
    max_adapters: int = 0  # how many it keeps in memory at once; 0: it accepts none


class Heartbeat(Message, frozen=True, tag="beat"):
    """Sent by the engine's IO thread, even while the main thread computes."""

    engine: str
    incarnation: str
    number: int
    phase: Phase
    phase_s: float  # time in this phase
    stalled_s: float  # since the last computed token while there were requests; 0 when idle
    live: list[LiveRequest]
    stats: EngineStats
    store: StoreStats | None = None


class Accepted(Message, frozen=True, tag="accepted"):
    """The engine has accepted the request."""

    request_id: str
    attempt: int


class Refused(Message, frozen=True, tag="refused"):
    """The engine has refused the request."""

    request_id: str
    attempt: int
    # `invalid`, `too_large` and `unsupported` are errors in the request (400). `full` and
    # `draining` are not: the router places the request elsewhere or waits.
    reason: RefusalReason
    message: str
    param: str | None = None  # the invalid field

    @classmethod
    def of(
        cls,
        request: Submit | Encode,
        reason: RefusalReason,
        message: str,
        param: str | None = None,
    ) -> Refused:
        """Return the refusal of ``request``."""
        return cls(
            request_id=request.request_id,
            attempt=request.attempt,
            reason=reason,
            message=message,
            param=param,
        )


class Tokens(Message, frozen=True, tag="tokens"):
    """One message per step, for all sequences with new tokens."""

    deltas: list[Delta]
    # `EngineStats.unevictable_bytes` now, if a sequence has ended: its memory is free before the
    # next heartbeat says so.
    unevictable_bytes: int | None = None


class Encoded(Message, frozen=True, tag="encoded"):
    """The vectors of the texts of an `Encode`, or a score for each of its pairs."""

    request_id: str
    attempt: int
    rows: bytes = b""  # float32, little-endian, in the order of the texts
    error: str | None = None  # the reason if there are none
    queue_s: float = 0.0  # from arrival to the start of the first text
    compute_s: float = 0.0  # from there to the end of the last text


class CacheEvents(Message, frozen=True, tag="cache_events"):
    """Changes to the set of block hashes in RAM."""

    number: int  # increases by one
    added: list[bytes]  # the complete set after a gap in `number`, or if `snapshot` is set
    removed: list[bytes]
    snapshot: bool = False


class Files(Message, frozen=True, tag="files"):
    """The reply to `FilesWanted`: one raw frame per name, in order."""

    names: list[str]


class Bye(Message, frozen=True, tag="bye"):
    """The engine is exiting; it has drained."""

    engine: str
    incarnation: str


ToEngine = (
    Ping
    | Submit
    | Encode
    | Abort
    | Drain
    | ClearCache
    | CheckAdapter
    | AdapterDecisions
    | FilesWanted
)
ToRouter = (
    Hello
    | Heartbeat
    | Accepted
    | Refused
    | Tokens
    | Encoded
    | AdapterChecked
    | AdapterDecisions
    | CacheEvents
    | Files
    | Bye
)
