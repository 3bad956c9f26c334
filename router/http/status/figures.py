"""The data of the status page: `/health`'s, and what is computed from one sample to the next."""

from __future__ import annotations

from msgspec import Struct

from router.fleet.metrics.recent import Incident, Percentiles
from router.http.endpoints.health import BatchTotals, EngineHealth, HealthStatus, ModelState
from shared.wire import StoreStats


class PromptTokens(Struct, frozen=True, kw_only=True):
    """Prompt tokens, by the source of their keys and values."""

    ram: int = 0
    ssd: int = 0
    computed: int = 0


class PromptProgress(Struct, frozen=True, kw_only=True):
    """The prompts that an engine has been computing for a while."""

    prompts: int
    computed: int  # total tokens, including those found in a cache
    tokens: int  # of all of them


class Rates(Struct, frozen=True, kw_only=True):
    """Rates of an engine between its last two sampled heartbeats."""

    generated: float  # tokens per second
    prompt: float  # prompt tokens per second, including those from the cache
    steps: float  # steps per second
    batch: float | None = None  # rows of a decode step; None without steps
    step_s: float | None = None


class DraftTotals(Struct, frozen=True, kw_only=True):
    drafted: int  # tokens since the start of the engine
    accepted: int
    saved_s: float


class EngineFigures(EngineHealth, frozen=True, kw_only=True):
    is_lost: bool
    silence_s: float  # since its last heartbeat
    running: int
    waiting: int
    rates: Rates | None  # None until two heartbeats were sampled
    memory_limit_bytes: int
    active_memory_bytes: int
    recent_prompts: PromptTokens  # of the last minute, as far as sampled
    prompts: PromptTokens  # since the start of the engine
    ssd: StoreStats | None
    drafts: DraftTotals | None  # None without speculation
    preemptions: int
    losses: int  # number of times it was lost
    computing: PromptProgress | None  # None: no prompt is taking long


class ModelFigures(ModelState, frozen=True, kw_only=True):
    aliases: list[str]
    adapters: list[str]
    context_length: int | None
    kv_bits: int | None
    capabilities: list[str]
    generated: float  # tokens per second
    first_token: Percentiles | None  # of the last minute
    between_tokens_s: float | None  # mean since the last sample
    engines: list[str]


class Point(Struct, frozen=True, kw_only=True):
    """The plotted values."""

    at: float  # seconds since the epoch
    generated: float  # tokens per second
    prompt: float  # prompt tokens per second, including those from the cache
    running: int  # sequences
    queued: int  # sequences
    batch: float | None  # rows of the decode steps of all engines
    first_token: float | None  # median of the last minute, in seconds
    hit_rate: float | None  # fraction of prompt tokens of the last minute found in a cache
    memory_pressure: float  # of the engine with the highest pressure


class ServerStatus(Struct, frozen=True, kw_only=True):
    """One sample."""

    started: int  # seconds since the epoch
    version: str
    status: HealthStatus
    reasons: list[str]
    now: Point
    first_token: Percentiles | None  # of the last minute
    loop_lag_s: float  # max of the last minute
    viewers: int
    batches: BatchTotals
    models: list[ModelFigures]
    engines: dict[str, EngineFigures]  # by name
    incidents: list[Incident]  # newest first
