"""Every setting of the server: each flag is declared here, once.

`parse` reads them from the command line, the environment (``MLX_LM_SERVER_`` and the
flag's name), a TOML file (``--config``) and the defaults, in that order of precedence.
All processes take the same flags, so that the supervisor can hand its own on.
"""

# ruff: noqa: RUF009  (`flag` makes a dataclass field)
from __future__ import annotations

import dataclasses
import ipaddress
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from shared.exits import EXIT_USAGE, fail
from shared.flags import FlagError, flag, resolve
from shared.link import LINK_VARIABLE
from shared.rundir import MAX_SOCKET_PATH_BYTES

_MODEL = "model"
_SERVER = "server"
_KV = "KV cache"
_SSD = "SSD cache"
_BATCH = "batching"
_GENERATION = "generation"
_ADMISSION = "admission control"
_SPECULATION = "speculative decoding"
_DISTRIBUTED = "distributed / tensor parallel"
_PROCESSES = "processes and logging"

_LATER_SPECULATION = "speculative decoding is"
_LATER_DISTRIBUTED = "distributed inference is"

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
    "auto",
    "none",
    "harmony",
    "think",
    "gemma4",
    "kimi_k3",
    "longcat",
    "mistral",
    "seed_oss",
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The resolved settings; ``Settings()`` has the defaults.

    Attributes have the names of the flags. None means that the flag was not set and
    something else decides (the device, the model, a private directory).
    """

    config: Path | None = flag(None, "TOML file with any of these settings", group=_SERVER)

    # -- model -----------------------------------------------------------------
    model: str = flag(
        "mlx-community/Qwen3-4B-4bit",
        "Hugging Face model id, local path, or 'demo' for the embedded model",
        group=_MODEL,
    )
    served_model_name: tuple[str, ...] = flag(
        (), "name the API answers to", group=_MODEL, shown_default="the model id"
    )
    adapter_path: Path | None = flag(
        None, "directory of a LoRA adapter, as mlx-lm makes them", group=_MODEL
    )
    trust_remote_code: bool = flag(
        False, "let the engine run code that comes with the model", group=_MODEL
    )
    chat_template: str | None = flag(
        None,
        "chat template: a file, or the template itself",
        group=_MODEL,
        shown_default="the model's",
    )
    chat_template_args: dict[str, Any] = flag(
        dict, "JSON object of arguments for the chat template", group=_MODEL
    )
    eos_token: str | None = flag(None, "end token", group=_MODEL, shown_default="the model's")
    pad_token: str | None = flag(None, "pad token", group=_MODEL, shown_default="the model's")
    bos_token: str | None = flag(None, "begin token", group=_MODEL, shown_default="the model's")
    tool_parser: ToolParserName = flag(
        "auto", "how the model writes tool calls; auto: as its tokenizer says", group=_MODEL
    )
    reasoning_parser: ReasoningParserName = flag(
        "auto", "how the model marks its reasoning; auto: as its tokenizer says", group=_MODEL
    )
    idle_unload_s: float = flag(
        0.0,
        "unload a model nobody asked for in so many seconds (0: never)",
        group=_MODEL,
        at_least=0,
        later="unloading is",
    )

    # -- server ----------------------------------------------------------------
    host: str = flag("0.0.0.0", "address to listen on", group=_SERVER)
    port: int = flag(
        8000, "port to listen on (0: any free one)", group=_SERVER, at_least=0, at_most=65535
    )
    api_key: tuple[str, ...] = flag(
        (), "bearer token that clients need", group=_SERVER, secret=True, split=False
    )
    api_key_file: Path | None = flag(
        None, "file with one API key a line", group=_SERVER, existing_file=True
    )
    admin_key: str | None = flag(
        None, "key for /admin", group=_SERVER, secret=True, later="the admin interface is"
    )
    metrics_key: str | None = flag(
        None, "key for /metrics", group=_SERVER, secret=True, shown_default="open"
    )
    max_request_bytes: int = flag(1048576, "largest request body", group=_SERVER, at_least=1)
    response_store_mb: int = flag(
        64, "MB of memory for stored responses (0: none is stored)", group=_SERVER, at_least=0
    )
    cors_origin: tuple[str, ...] = flag((), "web origin that may call the API, or *", group=_SERVER)
    root_path: str = flag("", "path a proxy serves this under", group=_SERVER)
    ssl_certfile: Path | None = flag(None, "TLS certificate", group=_SERVER, existing_file=True)
    ssl_keyfile: Path | None = flag(None, "TLS key", group=_SERVER, existing_file=True)

    # -- KV cache --------------------------------------------------------------
    block_size: int = flag(16, "tokens per KV cache block", group=_KV, at_least=1, at_most=1024)
    num_blocks: int | None = flag(
        None,
        "blocks of KV cache memory",
        group=_KV,
        at_least=1,
        word="auto",
        shown_default="auto: from the device, at least 2048",
    )
    kv_bits: Literal[4, 8, 16] = flag(
        8, "bits of the KV cache; 16: the model's own type", group=_KV
    )
    kv_group_size: Literal[16, 32, 64, 128] = flag(
        64, "elements per scale of a quantized KV cache, at most", group=_KV
    )
    max_kv_size: int | None = flag(
        None, "longest context kept per sequence, in tokens", group=_KV, at_least=2
    )
    sequence_cache_size: int = flag(
        50, "kept states of recurrent layers; 0: no prefix reuse for them", group=_KV, at_least=0
    )

    # -- SSD cache -------------------------------------------------------------
    ssd_cache_dir: Path = flag(
        lambda: Path("~/.cache/mlx-lm-server/kv-cache").expanduser(),
        "directory of the SSD tier",
        group=_SSD,
        shown_default="~/.cache/mlx-lm-server/kv-cache",
    )
    no_ssd: bool = flag(False, "serve without the SSD tier", group=_SSD)
    ssd_ttl_days: int = flag(7, "days after which an unused block goes", group=_SSD, at_least=1)
    ssd_policy: Literal["evict_only", "write_through"] = flag(
        "evict_only", "store blocks that leave RAM, or all when they are full", group=_SSD
    )
    ssd_durability: Literal["best_effort", "persistent"] = flag(
        "best_effort", "drop under pressure, or retry and sync", group=_SSD
    )
    ssd_async_writes: bool = flag(True, "write in the background", group=_SSD)
    ssd_writer_queue_size: int = flag(
        512, "blocks that may wait to be written", group=_SSD, at_least=1
    )
    ssd_persistent_max_retries: int = flag(
        3, "retries of a persistent write", group=_SSD, at_least=0
    )
    ssd_flush_interval_s: float = flag(
        1.0, "seconds between flushes of the writer", group=_SSD, more_than=0
    )
    ssd_max_size_gb: float = flag(50.0, "size limit in GB (0: none)", group=_SSD, at_least=0)

    # -- batching --------------------------------------------------------------
    max_batch_size: int = flag(8, "sequences that decode at once", group=_BATCH, at_least=1)
    prefill_batch_size: int = flag(4, "sequences that prefill at once", group=_BATCH, at_least=1)
    max_queue_size: int = flag(128, "requests that may wait", group=_BATCH, at_least=1)
    completion_batch_size: int = flag(
        32, "sequences an engine holds at once", group=_BATCH, at_least=1
    )
    prefill_chunk_tokens: int | None = flag(
        None,
        "largest piece of a prompt between two decode steps",
        group=_BATCH,
        at_least=1,
        word="auto",
    )

    # -- generation ------------------------------------------------------------
    default_max_tokens: int = flag(
        512, "max_tokens where a request has none", group=_GENERATION, at_least=1
    )
    max_prompt_tokens: int = flag(32768, "longest prompt", group=_GENERATION, at_least=1)
    max_generation_tokens: int = flag(32768, "largest max_tokens", group=_GENERATION, at_least=1)
    request_timeout_s: float = flag(
        120.0, "longest silence after the first token", group=_GENERATION, more_than=0
    )
    first_token_timeout_s: float = flag(
        300.0, "longest wait for the first token", group=_GENERATION, more_than=0
    )
    temperature: float | None = flag(
        None,
        "sampling temperature where a request has none",
        group=_GENERATION,
        at_least=0,
        at_most=100,
        shown_default="the model's",
    )
    top_p: float | None = flag(
        None,
        "nucleus where a request has none",
        group=_GENERATION,
        more_than=0,
        at_most=1,
        shown_default="the model's",
    )
    top_k: int | None = flag(
        None,
        "candidates where a request has none (0: all)",
        group=_GENERATION,
        at_least=0,
        shown_default="the model's",
    )
    min_p: float | None = flag(
        None,
        "least probability, as a part of the best one's, where a request has none",
        group=_GENERATION,
        at_least=0,
        at_most=1,
        shown_default="the model's",
    )

    # -- admission control -----------------------------------------------------
    max_concurrent_requests: int = flag(
        64, "requests running and waiting (0: no limit)", group=_ADMISSION, at_least=0
    )
    memory_pressure_threshold: float = flag(
        0.9,
        "part of the KV memory in use from which requests get a 503",
        group=_ADMISSION,
        more_than=0,
        at_most=1,
    )
    rate_limit_requests: int = flag(
        0,
        "requests per key and minute (0: no limit)",
        group=_ADMISSION,
        at_least=0,
        later="rate limits are",
    )
    rate_limit_tokens: int = flag(
        0,
        "tokens per key and minute (0: no limit)",
        group=_ADMISSION,
        at_least=0,
        later="rate limits are",
    )
    drain_timeout_s: float = flag(
        30.0, "how long a graceful stop waits", group=_ADMISSION, at_least=0
    )
    restart_wait_s: float = flag(
        30.0, "how long a request waits for a lost engine", group=_ADMISSION, at_least=0
    )
    stall_timeout_s: float = flag(
        60.0,
        "an engine that has work and computes nothing for so long is restarted",
        group=_ADMISSION,
        more_than=0,
    )

    # -- speculative decoding --------------------------------------------------
    spec_decode: Literal["none", "ngram", "draft"] = flag(
        "none", "where drafts come from", group=_SPECULATION, later=_LATER_SPECULATION
    )
    num_speculative_tokens: int = flag(
        5, "draft tokens a step", group=_SPECULATION, at_least=1, later=_LATER_SPECULATION
    )
    spec_decode_disable_batch_size: int = flag(
        8,
        "no drafts above this batch size",
        group=_SPECULATION,
        at_least=1,
        later=_LATER_SPECULATION,
    )
    ngram_max: int = flag(
        4, "longest n-gram", group=_SPECULATION, at_least=1, later=_LATER_SPECULATION
    )
    ngram_min: int = flag(
        1, "shortest n-gram", group=_SPECULATION, at_least=1, later=_LATER_SPECULATION
    )
    ngram_prompt_lookup: bool = flag(
        True, "look n-grams up in the prompt", group=_SPECULATION, later=_LATER_SPECULATION
    )
    draft_model_path: str | None = flag(
        None, "draft model", group=_SPECULATION, later=_LATER_SPECULATION
    )
    draft_model_quantize: str | None = flag(
        None,
        "deprecated, without effect: use a quantized draft model",
        group=_SPECULATION,
        ignored="deprecated and without effect; use a quantized draft model",
    )
    draft_context_len: int = flag(
        128,
        "context the draft model sees",
        group=_SPECULATION,
        at_least=1,
        at_most=512,
        later=_LATER_SPECULATION,
    )
    spec_decode_dynamic: bool = flag(
        True, "adapt the number of drafts", group=_SPECULATION, later=_LATER_SPECULATION
    )
    spec_decode_acceptance_threshold: float = flag(
        0.3,
        "acceptance below which drafting stops",
        group=_SPECULATION,
        at_least=0,
        at_most=1,
        later=_LATER_SPECULATION,
    )
    adaptive_k: bool = flag(
        True, "adapt k per sequence", group=_SPECULATION, later=_LATER_SPECULATION
    )

    # -- distributed -----------------------------------------------------------
    distributed_mode: Literal["off", "ring", "jaccl"] = flag(
        "off", "tensor parallel backend", group=_DISTRIBUTED, later=_LATER_DISTRIBUTED
    )
    distributed_sharding: Literal["tensor"] = flag(
        "tensor", "how the model is divided", group=_DISTRIBUTED, later=_LATER_DISTRIBUTED
    )
    distributed_strict: bool = flag(
        True, "refuse what does not divide evenly", group=_DISTRIBUTED, later=_LATER_DISTRIBUTED
    )
    distributed_hostfile: Path | None = flag(
        None,
        "hostfile of the ring backend",
        group=_DISTRIBUTED,
        variables=("MLX_HOSTFILE",),
        later=_LATER_DISTRIBUTED,
    )
    distributed_ibv_devices: str | None = flag(
        None,
        "IBV devices of the jaccl backend",
        group=_DISTRIBUTED,
        variables=("MLX_IBV_DEVICES",),
        later=_LATER_DISTRIBUTED,
    )
    distributed_jaccl_coordinator: str | None = flag(
        None,
        "coordinator address of the jaccl backend",
        group=_DISTRIBUTED,
        variables=("MLX_JACCL_COORDINATOR",),
        later=_LATER_DISTRIBUTED,
    )
    num_local_ranks: int | None = flag(
        None, "ranks on this machine", group=_DISTRIBUTED, at_least=1, later=_LATER_DISTRIBUTED
    )

    # -- processes and logging -------------------------------------------------
    engines: int = flag(
        1, "replicas of the model on this machine", group=_PROCESSES, at_least=1, at_most=64
    )
    engine_socket: str | None = flag(
        None,
        "where router and engines meet: ipc://PATH or tcp://HOST:PORT",
        group=_PROCESSES,
        shown_default="a private one",
    )
    kvstore_socket: str | None = flag(
        None,
        "where kvstore and engines meet: ipc://PATH or tcp://HOST:PORT",
        group=_PROCESSES,
        shown_default="a private one",
    )
    curve_dir: Path | None = flag(
        None, "ZeroMQ CURVE keys for tcp sockets", group=_PROCESSES, later="CURVE is"
    )
    log_level: Literal["debug", "info", "warning", "error"] = flag(
        "info", "least level that is logged", group=_PROCESSES
    )
    log_format: Literal["text", "json"] = flag("text", "form of a log line", group=_PROCESSES)


def parse(argv: Sequence[str], environ: Mapping[str, str], prog: str) -> Settings:
    """The settings that the user asked for.

    What makes no sense is one line on stderr and SystemExit(2), before anything starts.
    Warnings go to stderr too, except in a child process, whose supervisor gave them.
    """
    try:
        settings, warnings = resolve(
            Settings,
            argv,
            environ,
            prog=prog,
            description="LLM serving on MLX. Order of precedence: flag, environment "
            "variable, --config file, default.",
            other_variables=("MLX_LM_SERVER_BLAS",),
        )
        check(settings)
    except FlagError as error:
        raise SystemExit(fail(prog, error, EXIT_USAGE)) from None
    if LINK_VARIABLE not in environ:
        for warning in warnings:
            sys.stderr.write(f"{prog}: warning: {warning}\n")
    return settings


def check(settings: Settings) -> None:
    """Raises `FlagError` for values that are right alone and senseless together."""
    for smaller, larger in (
        ("ngram_min", "ngram_max"),
        ("max_batch_size", "completion_batch_size"),
        ("prefill_batch_size", "completion_batch_size"),
        ("default_max_tokens", "max_generation_tokens"),
    ):
        low, high = getattr(settings, smaller), getattr(settings, larger)
        if low > high:
            names = [f"--{name.replace('_', '-')}" for name in (smaller, larger)]
            raise FlagError(f"{names[0]}: {low} is more than {names[1]}, which is {high}")
    if settings.ssl_keyfile and not settings.ssl_certfile:
        raise FlagError("--ssl-keyfile: makes no sense without --ssl-certfile")
    if settings.root_path and not _is_path(settings.root_path):
        raise FlagError("--root-path: must begin with / and not end with one")
    for origin in settings.cors_origin:
        if origin != "*" and not _is_origin(origin):
            raise FlagError(f"--cors-origin: {origin!r} is not an origin like https://host:port")
    for key in (*settings.api_key, settings.metrics_key or "-"):
        if not key.isascii() or not key.isprintable() or " " in key:
            name = "--api-key" if key in settings.api_key else "--metrics-key"
            raise FlagError(f"{name}: only printable ASCII without spaces can go into a header")
    for name in ("engine_socket", "kvstore_socket"):
        address = getattr(settings, name)
        if address is not None:
            _check_socket(f"--{name.replace('_', '-')}", address)
    if settings.engine_socket and settings.engine_socket == settings.kvstore_socket:
        raise FlagError("--kvstore-socket: the same as --engine-socket")


def _check_socket(name: str, address: str) -> None:
    scheme, _, rest = address.partition("://")
    if scheme == "ipc":
        if not rest.startswith("/"):
            raise FlagError(f"{name}: {address!r} is not ipc:// with an absolute path")
        if len(rest.encode()) > MAX_SOCKET_PATH_BYTES:
            raise FlagError(f"{name}: the path is over {MAX_SOCKET_PATH_BYTES} bytes long")
        return
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise FlagError(f"{name}: {address!r} is neither ipc://PATH nor tcp://HOST:PORT")
    if not _is_loopback(host.strip("[]")):
        raise FlagError(f"{name}: {host} is not this machine, which needs --curve-dir")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _is_path(path: str) -> bool:
    return path.startswith("/") and not path.endswith("/") and not set(path) & set("?# ")


def _is_origin(origin: str) -> bool:
    try:
        parts = urlsplit(origin)
        parts.port  # noqa: B018  (raises for a bad one)
    except ValueError:
        return False
    return bool(parts.scheme and parts.hostname) and not (parts.path or parts.query)
