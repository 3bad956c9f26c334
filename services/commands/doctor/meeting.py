"""Checks of everything that processes and machines connect through: ports, sockets, keys,
certificates, other machines."""

from __future__ import annotations

import argparse
import shlex
import shutil
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from router.http.middleware.api_keys import ApiKeys
from services.commands.admin_client import NoServer, ask
from services.commands.doctor.report import Check, attempt, bad, good, warning
from services.processes.listener import ListenError, listen
from services.ranks.keepers import SSH
from shared.network.allow_list import AllowListError, read_allow_list
from shared.network.curve import ALLOW_LIST, CurveError, EngineKeys, load_pair
from shared.network.hostfile import HostfileError, RankHost, read_hostfile
from shared.network.named_address import is_named
from shared.settings import Settings

_SSH_TIMEOUT_S = 20


def checks(options: Settings) -> Iterator[Check]:
    yield _http(options)
    for flag, addresses in (
        ("--engine-socket", options.engine_socket),
        ("--kvstore-socket", options.kvstore_socket),
    ):
        for address in addresses:
            yield _socket(flag, address)
    if options.curve_dir is not None:
        yield from _curve_keys(options.curve_dir)
    if options.ssl_certfile is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        yield attempt(
            "TLS",
            str(options.ssl_certfile),
            partial(context.load_cert_chain, options.ssl_certfile, options.ssl_keyfile),
            "pass a certificate and its private key, both as PEM files",
            *(ssl.SSLError, OSError),
            flag="--ssl-certfile, --ssl-keyfile",
        )
    if options.has_keys:
        yield attempt(
            "API keys",
            "are required",
            lambda: ApiKeys(options),
            "docs/operations.md describes the format of a key file",
            *(OSError, ValueError),
        )
    if options.distributed_hostfile is not None:
        yield from _hosts(options.distributed_hostfile)


def _http(options: Settings) -> Check:
    address = f"{options.listen_host}:{options.port}"
    try:
        listen(options.listen_host, options.port).close()
    except ListenError as error:
        if _is_ours(options):
            text = f"{error}: an mlx-lm-server is running there"
            return warning("http", text, "stop it, or choose another --port")
        return bad("http", str(error), "find the process that uses it: lsof -i, or ss -ltnp")
    return good("http", f"{address} is free")


def _is_ours(options: Settings) -> bool:
    """Return whether an mlx-lm-server answers at the port."""
    scheme = "http" if options.ssl_certfile is None else "https"
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(options.listen_host, options.listen_host)
    url = f"{scheme}://{host}:{options.port}{options.root_path}"
    try:
        _, found = ask(argparse.Namespace(url=url), "GET", "health")
    except NoServer:
        return False
    return bool({"version", "models"} <= found.keys())


def _socket(flag: str, address: str) -> Check:
    scheme, _, place = address.partition("://")
    if scheme == "tcp" or is_named(address):
        host, _, port = place.rpartition(":")
        try:
            socket.getaddrinfo(host.strip("[]") if host != "*" else None, int(port))
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or error
            return bad(flag[2:], f"{host} cannot be resolved ({reason})", f"correct {flag}")
        return good(flag[2:], address)
    path = Path(place)
    if not path.parent.is_dir():
        return bad(flag[2:], f"{path.parent} is not a folder", f"create it, or correct {flag}")
    if path.exists() and not path.is_socket():
        return bad(flag[2:], f"{path} is a file, not a socket", f"remove it, or correct {flag}")
    with socket.socket(socket.AF_UNIX) as probe:
        if path.exists() and probe.connect_ex(str(path)) == 0:
            text = f"a running process uses {path}"
            return bad(flag[2:], text, f"stop it, or choose another address ({flag})")
    stale = ": left over from a process that died, and will be replaced" if path.exists() else ""
    return good(flag[2:], f"{address}{stale}")


def _curve_keys(directory: Path) -> Iterator[Check]:
    """Read the keys of the roles for which the directory has keys."""
    is_server, is_engine = (directory / "server.secret").exists(), False
    try:
        if is_server:
            load_pair(directory, "server")
            allowed = read_allow_list(directory / ALLOW_LIST)
            yield good("keys", f"{directory}: server keys; {len(allowed)} engine keys may join")
        is_engine = (directory / "engine.secret").exists()
        if is_engine or not is_server:
            EngineKeys.load(directory)
            yield good("keys", f"{directory}: engine keys")
    except (CurveError, AllowListError) as error:
        remedy = "mlx-lm-server keys creates and lists keys"
        if "chmod" in str(error):
            remedy = "do that; if others could read it for a while, create new keys"
        yield bad("keys", f"--curve-dir: {error}", remedy)


def _hosts(path: Path) -> Iterator[Check]:
    """Connect to each machine of the hostfile except the first, which is this one, like
    an engine."""
    try:
        hosts = read_hostfile(path)[1:]
    except HostfileError as error:
        yield bad("hosts", f"--distributed-hostfile: {error}", "docs/distributed.md has an example")
        return
    if shutil.which("ssh") is None:
        yield bad("hosts", "ssh is not installed on this machine", "install an ssh client")
        return
    with ThreadPoolExecutor(len(hosts)) as threads:
        yield from threads.map(_host, hosts)


def _host(host: RankHost) -> Check:
    command = [*SSH, host.ssh, f"{shlex.quote(host.python or sys.executable)} --version"]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SSH_TIMEOUT_S,
            check=False,
        )
        said = (done.stdout + done.stderr).strip() or f"ssh exited with code {done.returncode}"
    except subprocess.TimeoutExpired:
        said = f"no response within {_SSH_TIMEOUT_S} s"
    last = said.splitlines()[-1]
    if last.startswith("Python "):
        return good("hosts", f"{host.ssh}: {last}")
    remedy = f"ssh {host.ssh} must work without a password, with the same installation there"
    return bad("hosts", f"cannot use {host.ssh}: {last}", remedy)
