"""What the status page shows: a sample of the server's state, and the samples of some minutes."""

from __future__ import annotations

from msgspec import Struct

from router.fleet.metrics.recent import Incident, Percentiles
from router.fleet.models.supervised import ConfiguredState
from router.http.endpoints.health import BatchTotals, BlockCounts, HealthStatus
from shared.wire import StoreStats


class PromptTokens(Struct, frozen=True, kw_only=True):
    """Tokens of prompts, by where their keys and values came from."""

    ram: int = 0
    ssd: int = 0
    computed: int = 0


class PromptProgress(Struct, frozen=True, kw_only=True):
    """The prompts that an engine has been computing for a while."""

    prompts: int
    computed: int  # tokens of all of them, those found in a cache included
    tokens: int  # of all of them


class Rates(Struct, frozen=True, kw_only=True):
    """What an engine did between its last two beats that were sampled."""

    generated: float  # tokens a second
    prompt: float  # tokens of prompts a second, those of the cache included
    steps: float  # steps a second
    batch: float | None = None  # rows of a decode step; None without steps
    step_s: float | None = None


class DraftTotals(Struct, frozen=True, kw_only=True):
    drafted: int  # tokens since the start of the engine
    accepted: int
    saved_s: float


class EngineFigures(Struct, frozen=True, kw_only=True):
    name: str
    phase: str
    ready: bool
    trouble: str | None
    is_lost: bool
    silence_s: float  # since its last beat
    sequences: int  # placed there by this router
    max_sequences: int
    running: int
    waiting: int
    rates: Rates | None  # None until two beats were sampled
    memory_pressure: float  # the part of the KV memory that running sequences hold
    memory_limit_bytes: int
    active_memory_bytes: int
    blocks: BlockCounts
    recent_prompts: PromptTokens  # of the last minute, as far as it was sampled
    prompts: PromptTokens  # since the start of the engine
    ssd: StoreStats | None
    drafts: DraftTotals | None  # None without speculation
    preemptions: int
    losses: int  # how often it was lost
    version: str
    computing: PromptProgress | None = None  # None: no prompt takes long


class ModelFigures(Struct, frozen=True, kw_only=True):
    id: str
    aliases: list[str]
    adapters: list[str]
    status: HealthStatus
    state: ConfiguredState
    reason: str | None
    context_length: int | None
    kv_bits: int | None
    capabilities: list[str]
    queued: int
    generated: float  # tokens a second
    first_token: Percentiles | None  # of the last minute
    between_tokens_s: float | None  # mean since the last sample
    engines: list[str]


class Point(Struct, frozen=True, kw_only=True):
    """What is plotted."""

    at: float  # seconds since the epoch
    generated: float  # tokens a second
    prompt: float  # tokens of prompts a second
    running: int  # sequences
    queued: int  # sequences
    batch: float | None  # rows of the decode steps of all engines
    first_token: float | None  # median of the last minute, in seconds
    hit_rate: float | None  # part of the tokens of the last minute's prompts found in a cache
    memory_pressure: float  # that of the engine that has most


class ServerStatus(Struct, frozen=True, kw_only=True):
    """One sample."""

    started: int  # seconds since the epoch
    version: str
    status: HealthStatus
    reasons: list[str]
    now: Point
    first_token: Percentiles | None  # of the last minute
    loop_lag_s: float  # the longest of the last minute
    viewers: int
    batches: BatchTotals
    models: list[ModelFigures]
    engines: dict[str, EngineFigures]  # by name: of many engines some each time, all at first
    incidents: list[Incident]  # the newest first
