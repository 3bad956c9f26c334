"""Checks for settings that are valid alone but contradict each other."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from shared.flags import FlagError
from shared.network.client_address import TrustedProxies
from shared.network.host_names import is_loopback
from shared.network.hostfile import HostfileError, rdma_matrix, read_hostfile
from shared.network.named_address import is_named
from shared.rundir import MAX_SOCKET_PATH_BYTES
from shared.settings.adapters import adapters_of
from shared.settings.groups import Settings

_FIM_LAYOUT = re.compile(r"auto|none|.+\{prefix\}.+\{suffix\}.*|.+\{suffix\}.+\{prefix\}.*")
_LIMITS_URL = re.compile(r"(redis|valkey)(s?://[^/]|\+unix:///)")


def check(settings: Settings) -> None:
    """Raise `FlagError` if settings contradict each other."""
    for smaller, larger in (
        ("ngram_min", "ngram_max"),
        ("max_batch_size", "completion_batch_size"),
        ("prefill_batch_size", "completion_batch_size"),
        ("default_max_tokens", "max_generation_tokens"),
    ):
        low, high = getattr(settings, smaller), getattr(settings, larger)
        if low is not None and low > high:
            names = [f"--{name.replace('_', '-')}" for name in (smaller, larger)]
            raise FlagError(f"{names[0]}: {low} is greater than {names[1]}, which is {high}")
    if settings.spec_decode == "draft" and settings.draft_model_path is None:
        raise FlagError("--spec-decode: draft requires --draft-model-path")
    if settings.draft_model_path is not None and settings.spec_decode not in ("draft", "auto"):
        raise FlagError("--draft-model-path: has no effect without --spec-decode draft or auto")
    if not _FIM_LAYOUT.fullmatch(settings.fim_layout):
        raise FlagError(
            "--fim-layout: must be auto, none, or tokens around {prefix} and {suffix}, such as "
            "'<PRE>{prefix}<SUF>{suffix}<MID>'"
        )
    _check_adapters(settings)
    _check_ranks(settings)
    if settings.max_engines is not None and settings.max_engines < settings.engines:
        raise FlagError(f"--max-engines: less than --engines, which is {settings.engines}")
    for label in settings.ray_label:
        if not all(label.partition("=")):
            raise FlagError(f"--ray-label: {label!r} is not NAME=VALUE")
    if settings.ssl_keyfile and not settings.ssl_certfile:
        raise FlagError("--ssl-keyfile: requires --ssl-certfile")
    if settings.root_path and not _is_path(settings.root_path):
        raise FlagError("--root-path: must begin with / and must not end with /")
    try:
        TrustedProxies(settings.trusted_proxy)
    except ValueError as error:
        raise FlagError(f"--trusted-proxy: {error}") from None
    for origin in settings.cors_origin:
        if origin != "*" and not _is_origin(origin):
            raise FlagError(f"--cors-origin: {origin!r} is not an origin like https://host:port")
    single = {"--metrics-key": settings.metrics_key, "--admin-key": settings.admin_key}
    keys = [("--api-key", key) for key in settings.api_key]
    for name, key in (*keys, *single.items()):
        if key is not None and (not key.isascii() or not key.isprintable() or " " in key):
            raise FlagError(f"{name}: only printable ASCII without spaces can be sent in a header")
    if settings.admin_key is not None and settings.admin_key in settings.api_key:
        raise FlagError(
            "--admin-key: must differ from every --api-key, or all clients could administer the "
            "server"
        )
    if settings.limits_url is not None and not _LIMITS_URL.match(settings.limits_url):
        raise FlagError("--limits-url: expected redis://host:port/0 or redis+unix:///path")
    if settings.otlp_endpoint is not None and not _is_url(settings.otlp_endpoint):
        raise FlagError(
            f"--otlp-endpoint: {settings.otlp_endpoint!r} is not a URL like http://host:4318"
        )
    for name in ("engine_socket", "kvstore_socket"):
        addresses = getattr(settings, name)
        for address in addresses:
            flag = f"--{name.replace('_', '-')}"
            _check_socket(flag, address, settings.curve_dir is not None, name == "engine_socket")
        if len(set(addresses)) < len(addresses):
            raise FlagError(f"--{name.replace('_', '-')}: an address is given twice")
    if set(settings.engine_socket) & set(settings.kvstore_socket):
        raise FlagError("--kvstore-socket: must differ from --engine-socket")


def _check_adapters(settings: Settings) -> None:
    adapters_of(settings)
    if settings.adapter_path is not None and (settings.adapter or settings.max_adapters):
        raise FlagError(
            "--adapter: has no effect beside --adapter-path, which applies to every request: fuse "
            "that one with mlx_lm.fuse, or give it a name"
        )


def _check_ranks(settings: Settings) -> None:
    if settings.distributed_mode == "off":
        if settings.num_local_ranks is not None:
            raise FlagError("--num-local-ranks: requires --distributed-mode ring")
        return
    if settings.distributed_mode == "jaccl" and settings.num_local_ranks is not None:
        raise FlagError("--num-local-ranks: jaccl connects ranks on different machines only")
    if settings.num_local_ranks is None:
        _check_hosts(settings)
    if settings.ranks > 1 and settings.adapter_path is not None:
        raise FlagError("--adapter-path: adapters cannot be split across ranks")
    if settings.ranks > 1 and (settings.adapter or settings.max_adapters):
        name = "--adapter" if settings.adapter else "--max-adapters"
        raise FlagError(f"{name}: adapters cannot be split across ranks")
    if settings.ranks > 1 and settings.draft_model_path is not None:
        raise FlagError("--draft-model-path: not supported with several ranks")


def _check_hosts(settings: Settings) -> None:
    if settings.distributed_hostfile is None:
        raise FlagError("--distributed-mode: requires --num-local-ranks or --distributed-hostfile")
    try:
        hosts = read_hostfile(settings.distributed_hostfile)
        if settings.distributed_mode == "jaccl":
            rdma_matrix(hosts, settings.distributed_ibv_devices)
    except HostfileError as error:
        raise FlagError(f"--distributed-hostfile: {error}") from None
    if hosts[0].address and settings.engines > 1:
        raise FlagError(
            "--engines: must be 1, because mlx.launch has started the ranks of one engine"
        )
    coordinator = settings.distributed_jaccl_coordinator
    host, _, port = (coordinator or "host:1").rpartition(":")
    if not host or not _is_port(port):
        raise FlagError(f"--distributed-jaccl-coordinator: {coordinator!r} is not HOST:PORT")


def _check_socket(name: str, address: str, has_keys: bool, may_be_named: bool) -> None:
    scheme, _, rest = address.partition("://")
    if scheme == "ipc":
        if not rest.startswith("/"):
            raise FlagError(f"{name}: {address!r} is not an ipc:// address with an absolute path")
        if len(rest.encode()) > MAX_SOCKET_PATH_BYTES:
            raise FlagError(f"{name}: the path is longer than {MAX_SOCKET_PATH_BYTES} bytes")
        return
    host, _, port = rest.rpartition(":")
    is_tcp = scheme == "tcp" or (may_be_named and is_named(address))
    if not is_tcp or not host or not _is_port(port):
        raise FlagError(f"{name}: {address!r} is neither ipc://PATH nor tcp://HOST:PORT")
    if not has_keys and not is_loopback(host.strip("[]")):
        raise FlagError(f"{name}: {host} is another machine, which requires --curve-dir")


def _is_port(text: str) -> bool:
    return re.fullmatch("[0-9]{1,5}", text) is not None and 0 < int(text) < 65536


def _is_path(path: str) -> bool:
    return path.startswith("/") and not path.endswith("/") and not set(path) & set("?# ")


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        parts.port  # noqa: B018  (raises for a bad one)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname)


def _is_origin(origin: str) -> bool:
    try:
        parts = urlsplit(origin)
        parts.port  # noqa: B018  (raises for a bad one)
    except ValueError:
        return False
    return bool(parts.scheme and parts.hostname) and not (parts.path or parts.query)
