"""The groups of settings: every flag of the server is declared here, once.

A group is a section of ``--help``. Each attribute has the name of its flag. None means that the
flag is not set: the device, the model or a private directory then decides.
"""

# ruff: noqa: RUF009  (`flag` makes a dataclass field)
from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

from shared.flags import flag
from shared.settings.adapters import AdapterSettings
from shared.settings.batches import BatchesSettings
from shared.settings.images import ImageSettings
from shared.settings.machines import ClusterSettings, DistributedSettings
from shared.settings.parser_names import ReasoningParserName, ToolParserName
from shared.settings.speculation import SpeculationSettings

_model_flag = partial(flag, None, shown_default="model default")
CPUPrecision = Literal["exact", "compact", "fast", "auto"]
_MAX_DISK_GB = 10**9
"""An exabyte, which as a number of bytes has 64 bits."""


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    GROUP: ClassVar = "server"

    config: Path | None = flag(None, "TOML file with any of these settings")
    host: str | None = flag(
        None,
        "address to listen on",
        shown_default="0.0.0.0 if API keys are set, otherwise 127.0.0.1",
    )
    port: int = flag(8000, "port to listen on (0: any free one)", at_least=0, at_most=65535)
    api_key: tuple[str, ...] = flag(
        (), "bearer token that clients must send", secret=True, split=False
    )
    api_key_file: Path | None = flag(
        None,
        "file with one API key per line, each with optional name, rpm, tpm, concurrency, models, "
        "priority",
        existing_file=True,
    )
    cache_salt_per_key: bool = flag(False, "do not share cached prefixes between API keys")
    admin_key: str | None = flag(
        None, "bearer token for /admin", secret=True, shown_default="none: /admin is disabled"
    )
    ollama_manage: bool = flag(
        False, "allow every API key to load, unload, pull and delete models through Ollama's API"
    )
    metrics_key: str | None = flag(
        None, "bearer token for /metrics", secret=True, shown_default="open"
    )
    trusted_proxy: tuple[str, ...] = flag(
        (),
        "address or network of a reverse proxy whose X-Forwarded-For tells clients without API "
        "keys apart",
    )
    max_connections_per_address: int | None = flag(
        None,
        "max connections of one address, except of a --trusted-proxy (0: no limit)",
        shown_default="half of those that the limit of open files allows",
        at_least=0,
    )
    body_memory_mb: int = flag(
        256,
        "memory for request bodies that are being received, in MB, shared fairly between API keys, "
        "or addresses without keys (at least four times --max-request-bytes)",
        at_least=1,
    )
    max_request_bytes: int | None = flag(
        None,
        "max size of a request body",
        at_least=1,
        word="auto",
        shown_default="auto: 16 bytes per token of the longest context, at least 1048576",
    )
    response_store_mb: int = flag(
        64, "memory for stored responses in MB (0: none are stored)", at_least=0
    )
    response_store_dir: Path | None = flag(
        None,
        "directory that keeps stored responses across restarts",
        shown_default="in memory only",
    )
    reasoning_key: str | None = flag(
        None,
        "key that encrypts reasoning held by clients (use the same key on routers that share "
        "clients)",
        secret=True,
        shown_default="a generated key, stored on disk",
    )
    skip_unsupported_content: bool = flag(
        False, "replace images and documents with a note instead of rejecting the request"
    )
    allowed_host: tuple[str, ...] = flag(
        (), "Host name that a server without API keys accepts; .NAME: all its subdomains; *: any"
    )
    cors_origin: tuple[str, ...] = flag((), "web origin that may call the API, or * for any")
    root_path: str = flag("", "path prefix under which a reverse proxy serves this server")
    no_page: bool = flag(False, "do not serve the status and chat page at /")
    ssl_certfile: Path | None = flag(None, "TLS certificate file", existing_file=True)
    ssl_keyfile: Path | None = flag(None, "TLS private key file", existing_file=True)


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    GROUP: ClassVar = "model"

    model: str = flag(
        "mlx-community/Qwen3-4B-4bit",
        "Hugging Face model id, local path, or 'demo' for the built-in model",
    )
    served_model_name: tuple[str, ...] = flag(
        (), "name of the model in the API", shown_default="the model id"
    )
    task: Literal["auto", "generate", "embed", "rerank"] = flag(
        "auto",
        "task of the model; auto: read from its files, otherwise generate",
    )
    adapter_path: Path | None = flag(None, "directory of a LoRA adapter in mlx-lm's format")
    trust_remote_code: bool = flag(False, "allow the engine to run code that comes with the model")
    chat_template: str | None = flag(
        None, "chat template: a file, or the template text", shown_default="model default"
    )
    chat_template_args: dict[str, Any] = flag(
        dict, "JSON object with arguments for the chat template"
    )
    eos_token: str | None = _model_flag("EOS token")
    pad_token: str | None = _model_flag("padding token")
    bos_token: str | None = _model_flag("BOS token")
    tool_parser: ToolParserName = flag(
        "auto", "format of the model's tool calls; auto: detected from its tokenizer"
    )
    reasoning_parser: ReasoningParserName = flag(
        "auto", "format of the model's reasoning; auto: detected from its tokenizer"
    )
    fim_layout: str = flag(
        "auto",
        "prompt for fill-in-the-middle: the model's tokens around {prefix} and {suffix}, or none; "
        "auto: detected from its tokenizer",
    )
    cpu_precision: CPUPrecision = flag(
        "auto",
        "arithmetic for quantized weights on a CPU; exact: weights dequantized to fp32, as many as "
        "fit in a quarter of the memory; compact: quantized weights only; fast: quantized weights "
        "with 8-bit activations; auto: exact",
    )
    prove: Literal["once", "always"] = flag(
        "once",
        "check that batches give this model's answers, at the first start or at every start",
    )
    idle_unload_s: float = flag(
        0.0, "seconds without a request until a model is unloaded (0: never)", at_least=0
    )
    memory_gb: float | None = flag(
        None,
        "memory of one engine in GB, for weights and KV cache",
        more_than=0,
        word="auto",
        shown_default="auto: an equal share of the device's memory",
    )


@dataclass(frozen=True, kw_only=True)
class KVCacheSettings:
    GROUP: ClassVar = "KV cache"

    block_size: int = flag(16, "tokens per KV cache block", at_least=1, at_most=1024)
    num_blocks: int | None = flag(
        None,
        "number of KV cache blocks in memory",
        at_least=1,
        word="auto",
        shown_default="auto: from the device's memory, at least 2048 if they fit",
    )
    kv_bits: Literal[4, 8, 16] = flag(
        8, "bits per element of the KV cache; 16: the model's own type"
    )
    kv_group_size: Literal[16, 32, 64, 128] = flag(
        64, "max elements per scale of a quantized KV cache"
    )
    max_kv_size: int | None = flag(None, "max context kept per sequence, in tokens", at_least=2)
    sequence_cache_size: int = flag(
        50,
        "snapshots of recurrent state to keep (0: no prefix reuse for models with such state)",
        at_least=0,
    )


@dataclass(frozen=True, kw_only=True)
class SSDCacheSettings:
    GROUP: ClassVar = "SSD cache"

    ssd_cache_dir: Path = flag(
        lambda: Path("~/.cache/mlx-lm-server/kv-cache").expanduser(),
        "directory of the SSD tier",
        shown_default="~/.cache/mlx-lm-server/kv-cache",
    )
    no_ssd: bool = flag(False, "disable the SSD tier")
    ssd_ttl_days: int = flag(7, "days until an unused block is deleted", at_least=1, at_most=36500)
    ssd_policy: Literal["evict_only", "write_through"] = flag(
        "evict_only", "store blocks when they are evicted from RAM, or every block once it is full"
    )
    ssd_durability: Literal["best_effort", "persistent"] = flag(
        "best_effort",
        "under pressure: drop blocks (best_effort), or retry and sync (persistent)",
    )
    ssd_async_writes: bool = flag(True, "write in the background")
    ssd_writer_queue_size: int = flag(
        512, "max blocks queued for writing", at_least=1, at_most=1_000_000
    )
    ssd_persistent_max_retries: int = flag(3, "retries of a write in persistent mode", at_least=0)
    ssd_flush_interval_s: float = flag(
        1.0,
        "seconds between flushes of the writer (idle: five times as long)",
        more_than=0,
        at_most=86400,
    )
    ssd_max_size_gb: float = flag(
        50.0, "max size of the SSD tier in GB (0: no limit)", at_least=0, at_most=_MAX_DISK_GB
    )
    disk_reserve_gb: float = flag(
        5.0,
        "disk space in GB that the SSD tier leaves free (0: none)",
        at_least=0,
        at_most=_MAX_DISK_GB,
    )


@dataclass(frozen=True, kw_only=True)
class BatchingSettings:
    GROUP: ClassVar = "batching"

    max_batch_size: int = flag(
        8,
        "max sequences that decode at once",
        shown_default="8; on a GPU up to 32, if memory holds 4,096 tokens of each",
        at_least=1,
    )
    prefill_batch_size: int = flag(
        4,
        "max sequences that prefill at once, not counting those with at most 32 tokens left after "
        "a cached prefix",
        at_least=1,
    )
    max_queue_size: int = flag(128, "max requests in the queue", at_least=1)
    completion_batch_size: int = flag(32, "max sequences that one engine holds", at_least=1)
    prefill_chunk_tokens: int | None = flag(
        None, "max prompt tokens computed in one pass", at_least=1, word="auto"
    )
    streams_share: float = flag(
        0.5,
        "share of the time reserved for running streams while prompts are computed",
        at_least=0.05,
        at_most=0.95,
    )
    deterministic: bool = flag(
        True, "compute the same bits for a token's scores in every batch, on a CPU"
    )


@dataclass(frozen=True, kw_only=True)
class GenerationSettings:
    GROUP: ClassVar = "generation"

    default_max_tokens: int | None = flag(
        None,
        "max_tokens of requests that set none",
        at_least=1,
        word="auto",
        shown_default="auto: 512; --max-generation-tokens for a model that reasons",
    )
    max_prompt_tokens: int | None = flag(
        None,
        "max length of a prompt, in tokens",
        at_least=1,
        word="auto",
        shown_default="auto: what the model and memory hold",
    )
    max_generation_tokens: int = flag(
        32768, "max tokens of an answer; a larger max_tokens is reduced", at_least=1
    )
    request_timeout_s: float = flag(
        120.0, "timeout in seconds for each token after the first", more_than=0
    )
    first_token_timeout_s: float = flag(
        300.0, "timeout in seconds for the first token", more_than=0
    )
    temperature: float | None = _model_flag(
        "temperature of requests that set none", at_least=0, at_most=100
    )
    decision_temperature: float = flag(
        1.0,
        "temperature of the probabilities of typed decisions; above 1, they are less extreme",
        more_than=0,
        at_most=100,
    )
    top_p: float | None = _model_flag("top_p of requests that set none", more_than=0, at_most=1)
    top_k: int | None = _model_flag("top_k of requests that set none (0: all tokens)", at_least=0)
    min_p: float | None = _model_flag(
        "min_p of requests that set none: min probability relative to the most likely token",
        at_least=0,
        at_most=1,
    )


@dataclass(frozen=True, kw_only=True)
class AdmissionSettings:
    GROUP: ClassVar = "admission control"

    max_concurrent_requests: int = flag(
        64, "max requests running and queued (0: no limit)", at_least=0
    )
    memory_pressure_threshold: float = flag(
        0.9,
        "fraction of KV memory in use above which requests are answered with 503",
        more_than=0,
        at_most=1,
    )
    rate_limit_requests: int = flag(0, "requests per minute per API key (0: no limit)", at_least=0)
    rate_limit_tokens: int = flag(0, "tokens per minute per API key (0: no limit)", at_least=0)
    limits_url: str | None = flag(
        None,
        "Redis or Valkey for rate limits shared by several routers: redis://HOST:PORT",
        secret=True,
        shown_default="in memory",
    )
    drain_timeout_s: float = flag(30.0, "max seconds of a graceful shutdown", at_least=0)
    pre_stop_delay_s: float = flag(
        0.0,
        "seconds to keep serving after a stop signal, while /readyz answers 503",
        at_least=0,
    )
    restart_wait_s: float = flag(
        30.0, "seconds that requests wait for a lost engine to come back", at_least=0
    )
    stall_timeout_s: float = flag(
        60.0, "seconds without progress after which an engine with work is restarted", more_than=0
    )


@dataclass(frozen=True, kw_only=True)
class ProcessSettings:
    GROUP: ClassVar = "processes and logging"

    engines: int = flag(1, "replicas of each model", at_least=1, at_most=1024)
    spare_engine_after_s: float = flag(
        15.0,
        "seconds after the start of an engine until a spare process is started, which makes the "
        "start of the next engine faster (0: none)",
        at_least=0,
    )
    fleet_memory_gb: float | None = flag(
        None,
        "total memory of all engines on this machine in GB; models that do not fit are loaded on "
        "demand",
        more_than=0,
        word="auto",
        shown_default="auto: the device's memory",
    )
    engine_socket: tuple[str, ...] = flag(
        (),
        "address where router and engines connect: ipc://PATH or tcp://HOST:PORT; a router "
        "serves every address in a list, an engine joins the router at each; "
        "dns+tcp://NAME:PORT, for engines: the routers at all addresses of a name, looked up "
        "again over time",
        shown_default="a private socket",
    )
    kvstore_socket: tuple[str, ...] = flag(
        (),
        "address where kvstore and engines connect: ipc://PATH or tcp://HOST:PORT; a kvstore "
        "serves every address in a list, an engine uses one",
        shown_default="a private socket",
    )
    curve_dir: Path | None = flag(
        None,
        "directory with CURVE keys for tcp sockets, made by `mlx-lm-server keys`",
        shown_default="none: tcp only within this machine, unencrypted",
    )
    otlp_endpoint: str | None = flag(
        None,
        "OpenTelemetry collector for traces, OTLP over HTTP: http://HOST:4318",
        shown_default="none: no traces",
        variables=("OTEL_EXPORTER_OTLP_ENDPOINT",),
    )
    log_level: Literal["debug", "info", "warning", "error"] = flag(
        "info", "minimum level of log messages"
    )
    log_format: Literal["text", "json"] = flag("text", "format of log lines")


@dataclass(frozen=True, kw_only=True)
class Settings(
    ServerSettings,
    ModelSettings,
    AdapterSettings,
    KVCacheSettings,
    SSDCacheSettings,
    BatchingSettings,
    GenerationSettings,
    AdmissionSettings,
    BatchesSettings,
    ImageSettings,
    SpeculationSettings,
    DistributedSettings,
    ClusterSettings,
    ProcessSettings,
):
    """The resolved settings; ``Settings()`` has the defaults."""

    given: frozenset[str] = dataclasses.field(default=frozenset(), compare=False, repr=False)
    """The names of the fields that the user has set."""

    @property
    def has_keys(self) -> bool:
        return bool(self.api_key) or self.api_key_file is not None

    @property
    def listen_host(self) -> str:
        """The address to listen on. Without keys, by default only this machine is served."""
        return self.host or ("0.0.0.0" if self.has_keys else "127.0.0.1")
