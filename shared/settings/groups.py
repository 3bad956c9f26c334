"""The groups of settings: every flag of the server is declared here, once.

A group is a section of ``--help``. Attributes have the names of the flags. None means that the
flag was not set, and that the device, the model or a private directory decides.
"""

# ruff: noqa: RUF009  (`flag` makes a dataclass field)
from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

from shared.flags import flag
from shared.settings.batches import BatchesSettings
from shared.settings.images import ImageSettings
from shared.settings.machines import ClusterSettings, DistributedSettings

_model_flag = partial(flag, None, shown_default="the model's")

ToolParserName = Literal[
    "auto",
    "none",
    "json",
    "harmony",
    "function_gemma",
    "gemma4",
    "glm47",
    "json_tools",
    "kimi_k2",
    "kimi_k3",
    "laguna",
    "longcat",
    "minicpm5",
    "minimax_m2",
    "mistral",
    "muse_spark",
    "pythonic",
    "qwen3_coder",
]
ReasoningParserName = Literal[
    "auto", "none", "harmony", "think", "gemma4", "kimi_k3", "longcat", "mistral", "seed_oss"
]


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    GROUP: ClassVar = "server"

    config: Path | None = flag(None, "TOML file with any of these settings")
    host: str = flag("0.0.0.0", "address to listen on")
    port: int = flag(8000, "port to listen on (0: any free one)", at_least=0, at_most=65535)
    api_key: tuple[str, ...] = flag((), "bearer token that clients need", secret=True, split=False)
    api_key_file: Path | None = flag(
        None,
        "file with one API key a line, perhaps with name, rpm, tpm, concurrency, models, priority",
        existing_file=True,
    )
    cache_salt_per_key: bool = flag(False, "share no cached prefixes between API keys")
    admin_key: str | None = flag(
        None, "key for /admin", secret=True, shown_default="none: /admin is closed"
    )
    ollama_manage: bool = flag(
        False, "let every API key load, unload, pull and delete models through Ollama's API"
    )
    metrics_key: str | None = flag(None, "key for /metrics", secret=True, shown_default="open")
    max_request_bytes: int = flag(1048576, "largest request body", at_least=1)
    response_store_mb: int = flag(
        64, "MB of memory for stored responses (0: none is stored)", at_least=0
    )
    response_store_dir: Path | None = flag(
        None, "directory in which stored responses survive a restart", shown_default="memory only"
    )
    reasoning_key: str | None = flag(
        None,
        "key that seals reasoning which clients carry (the same for routers that share clients)",
        secret=True,
        shown_default="a stored one",
    )
    skip_unsupported_content: bool = flag(
        False, "put a note in place of images and documents, instead of refusing them"
    )
    allowed_host: tuple[str, ...] = flag(
        (), "name by which a server without keys may be called; .NAME: all below it; *: any"
    )
    cors_origin: tuple[str, ...] = flag((), "web origin that may call the API, or *")
    root_path: str = flag("", "path under which a proxy serves this")
    no_page: bool = flag(False, "serve no status and chat page at /")
    ssl_certfile: Path | None = flag(None, "TLS certificate", existing_file=True)
    ssl_keyfile: Path | None = flag(None, "TLS key", existing_file=True)


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    GROUP: ClassVar = "model"

    model: str = flag(
        "mlx-community/Qwen3-4B-4bit",
        "Hugging Face model id, local path, or 'demo' for the embedded model",
    )
    served_model_name: tuple[str, ...] = flag(
        (), "model name that the API accepts", shown_default="the model id"
    )
    task: Literal["auto", "generate", "embed", "rerank"] = flag(
        "auto",
        "what the model is for; auto: as its files say, and otherwise to generate text",
    )
    adapter_path: Path | None = flag(None, "directory of a LoRA adapter, as mlx-lm makes them")
    trust_remote_code: bool = flag(False, "let the engine run code that comes with the model")
    chat_template: str | None = flag(
        None, "chat template: a file, or the template itself", shown_default="the model's"
    )
    chat_template_args: dict[str, Any] = flag(
        dict, "JSON object of arguments for the chat template"
    )
    eos_token: str | None = _model_flag("end token")
    pad_token: str | None = _model_flag("pad token")
    bos_token: str | None = _model_flag("begin token")
    tool_parser: ToolParserName = flag(
        "auto", "how the model writes tool calls; auto: as its tokenizer says"
    )
    reasoning_parser: ReasoningParserName = flag(
        "auto", "how the model marks its reasoning; auto: as its tokenizer says"
    )
    cpu_precision: Literal["exact", "compact", "fast", "auto"] = flag(
        "auto",
        "products with quantized weights on a CPU: with weights in fp32 as far as a quarter of the "
        "memory holds them, with codes only, or with codes and activations in 8 bits; auto: exact",
    )
    prove: Literal["once", "always"] = flag(
        "once",
        "prove at the first start, or at every one, that batches give this model's answers",
    )
    idle_unload_s: float = flag(
        0.0, "seconds without a request after which a model is unloaded (0: never)", at_least=0
    )
    memory_gb: float | None = flag(
        None,
        "memory of one engine in GB, for weights and KV cache",
        more_than=0,
        word="auto",
        shown_default="auto: an equal part of the device's",
    )


@dataclass(frozen=True, kw_only=True)
class KVCacheSettings:
    GROUP: ClassVar = "KV cache"

    block_size: int = flag(16, "tokens per KV cache block", at_least=1, at_most=1024)
    num_blocks: int | None = flag(
        None,
        "blocks of KV cache memory",
        at_least=1,
        word="auto",
        shown_default="auto: from the device, at least 2048",
    )
    kv_bits: Literal[4, 8, 16] = flag(8, "bits of the KV cache; 16: the model's own type")
    kv_group_size: Literal[16, 32, 64, 128] = flag(
        64, "most elements per scale of a quantized KV cache"
    )
    max_kv_size: int | None = flag(None, "longest context kept per sequence, in tokens", at_least=2)
    sequence_cache_size: int = flag(
        50, "kept snapshots of recurrent state (0: no prefix reuse for such models)", at_least=0
    )


@dataclass(frozen=True, kw_only=True)
class SSDCacheSettings:
    GROUP: ClassVar = "SSD cache"

    ssd_cache_dir: Path = flag(
        lambda: Path("~/.cache/mlx-lm-server/kv-cache").expanduser(),
        "directory of the SSD tier",
        shown_default="~/.cache/mlx-lm-server/kv-cache",
    )
    no_ssd: bool = flag(False, "serve without the SSD tier")
    ssd_ttl_days: int = flag(7, "days after which an unused block is removed", at_least=1)
    ssd_policy: Literal["evict_only", "write_through"] = flag(
        "evict_only", "store blocks that leave RAM, or every block once it is full"
    )
    ssd_durability: Literal["best_effort", "persistent"] = flag(
        "best_effort", "drop under pressure, or retry and sync"
    )
    ssd_async_writes: bool = flag(True, "write in the background")
    ssd_writer_queue_size: int = flag(512, "blocks that may wait to be written", at_least=1)
    ssd_persistent_max_retries: int = flag(3, "retries of a persistent write", at_least=0)
    ssd_flush_interval_s: float = flag(1.0, "seconds between flushes of the writer", more_than=0)
    ssd_max_size_gb: float = flag(50.0, "size limit in GB (0: none)", at_least=0)
    disk_reserve_gb: float = flag(
        5.0, "GB that the SSD tier leaves free on its disk (0: none)", at_least=0
    )


@dataclass(frozen=True, kw_only=True)
class BatchingSettings:
    GROUP: ClassVar = "batching"

    max_batch_size: int = flag(8, "sequences that decode at once", at_least=1)
    prefill_batch_size: int = flag(4, "sequences that prefill at once", at_least=1)
    max_queue_size: int = flag(128, "requests that may wait", at_least=1)
    completion_batch_size: int = flag(32, "sequences an engine holds at once", at_least=1)
    prefill_chunk_tokens: int | None = flag(
        None, "most prompt tokens computed in one pass", at_least=1, word="auto"
    )
    streams_share: float = flag(
        0.5,
        "part of the time that running streams get while prompts are computed",
        at_least=0.05,
        at_most=0.95,
    )
    deterministic: bool = flag(
        True, "give a token's scores the same bits in every batch, where a CPU computes them"
    )


@dataclass(frozen=True, kw_only=True)
class GenerationSettings:
    GROUP: ClassVar = "generation"

    default_max_tokens: int = flag(512, "max_tokens where a request has none", at_least=1)
    max_prompt_tokens: int = flag(32768, "longest prompt, in tokens", at_least=1)
    max_generation_tokens: int = flag(32768, "largest max_tokens", at_least=1)
    request_timeout_s: float = flag(120.0, "seconds to wait for each further token", more_than=0)
    first_token_timeout_s: float = flag(300.0, "seconds to wait for the first token", more_than=0)
    temperature: float | None = _model_flag(
        "sampling temperature where a request has none", at_least=0, at_most=100
    )
    top_p: float | None = _model_flag("top_p where a request has none", more_than=0, at_most=1)
    top_k: int | None = _model_flag("top_k where a request has none (0: all tokens)", at_least=0)
    min_p: float | None = _model_flag(
        "min_p where a request has none: least probability, relative to the likeliest token's",
        at_least=0,
        at_most=1,
    )


@dataclass(frozen=True, kw_only=True)
class AdmissionSettings:
    GROUP: ClassVar = "admission control"

    max_concurrent_requests: int = flag(
        64, "requests running and waiting (0: no limit)", at_least=0
    )
    memory_pressure_threshold: float = flag(
        0.9,
        "fraction of the KV memory in use from which on requests get a 503",
        more_than=0,
        at_most=1,
    )
    rate_limit_requests: int = flag(0, "requests per key and minute (0: no limit)", at_least=0)
    rate_limit_tokens: int = flag(0, "tokens per key and minute (0: no limit)", at_least=0)
    limits_url: str | None = flag(
        None,
        "Redis or Valkey that holds the limits of several routers: redis://HOST:PORT",
        secret=True,
        shown_default="in memory",
    )
    drain_timeout_s: float = flag(30.0, "seconds that a graceful stop may take", at_least=0)
    pre_stop_delay_s: float = flag(
        0.0,
        "seconds that a server which was told to stop still serves, while /readyz is a 503",
        at_least=0,
    )
    restart_wait_s: float = flag(30.0, "seconds that requests wait for a lost engine", at_least=0)
    stall_timeout_s: float = flag(
        60.0, "seconds without progress after which an engine with work is restarted", more_than=0
    )


@dataclass(frozen=True, kw_only=True)
class SpeculationSettings:
    GROUP: ClassVar = "speculative decoding"

    spec_decode: Literal["none", "ngram", "draft", "auto"] = flag(
        "none",
        "where drafts come from: nowhere, earlier text, a draft model, or whatever is likely to be "
        "right, at no request's expense",
    )
    num_speculative_tokens: int = flag(
        5, "most drafts of a sequence in a step; with auto costs decide", at_least=1, at_most=16
    )
    spec_decode_disable_batch_size: int = flag(
        8, "with ngram and draft, no drafts while more sequences than this decode", at_least=1
    )
    ngram_max: int = flag(4, "longest n-gram", at_least=1, at_most=16)
    ngram_min: int = flag(1, "shortest n-gram", at_least=1)
    ngram_prompt_lookup: bool = flag(
        True, "look n-grams up in the prompt too, and not only in the answer"
    )
    draft_model_path: str | None = flag(
        None, "draft model, of the same vocabulary: a directory or an id of the hub"
    )
    draft_model_quantize: str | None = flag(
        None,
        "deprecated, without effect: use a quantized draft model",
        ignored="deprecated and without effect; use a quantized draft model",
    )
    draft_context_len: int = flag(
        128,
        "last tokens of a sequence with which the draft model begins",
        at_least=1,
        at_most=512,
    )
    spec_decode_dynamic: bool = flag(
        True, "draft as much as measured acceptance and costs of steps make worth while"
    )
    spec_decode_acceptance_threshold: float = flag(
        0.3,
        "part of its drafts that must be accepted, or a sequence stops drafting for a while",
        at_least=0,
        at_most=1,
    )
    adaptive_k: bool = flag(True, "measure acceptance for each sequence and not for all together")


@dataclass(frozen=True, kw_only=True)
class ProcessSettings:
    GROUP: ClassVar = "processes and logging"

    engines: int = flag(1, "replicas of a model", at_least=1, at_most=1024)
    spare_engine_after_s: float = flag(
        15.0,
        "seconds from the start of an engine to that of a spare process, with which the next engine"
        " starts sooner (0: none)",
        at_least=0,
    )
    fleet_memory_gb: float | None = flag(
        None,
        "memory of all engines of this machine in GB: models that do not fit are loaded on demand",
        more_than=0,
        word="auto",
        shown_default="auto: the device's",
    )
    engine_socket: tuple[str, ...] = flag(
        (),
        "address where router and engines meet: ipc://PATH or tcp://HOST:PORT; of several, a"
        " router serves all, and an engine joins the routers of all; dns+tcp://NAME:PORT, for"
        " engines: the routers at all addresses that a name has, now and later",
        shown_default="a private one",
    )
    kvstore_socket: tuple[str, ...] = flag(
        (),
        "address where kvstore and engines meet: ipc://PATH or tcp://HOST:PORT; a kvstore serves"
        " all of several, an engine uses one",
        shown_default="a private one",
    )
    curve_dir: Path | None = flag(
        None,
        "directory of CURVE keys, as `mlx-lm-server keys` makes them, for tcp sockets",
        shown_default="none: tcp only within this machine, unprotected",
    )
    otlp_endpoint: str | None = flag(
        None,
        "collector of OpenTelemetry traces, OTLP over HTTP: http://HOST:4318",
        shown_default="no traces",
        variables=("OTEL_EXPORTER_OTLP_ENDPOINT",),
    )
    log_level: Literal["debug", "info", "warning", "error"] = flag(
        "info", "lowest level that is logged"
    )
    log_format: Literal["text", "json"] = flag("text", "format of a log line")


@dataclass(frozen=True, kw_only=True)
class Settings(
    ServerSettings,
    ModelSettings,
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
    """The fields that the user has set."""
