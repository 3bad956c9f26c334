"""Checks of everything that processes and machines connect through: ports, sockets, keys,
certificates, other machines."""

from __future__ import annotations

import shlex
import shutil
import socket
import ssl
import subprocess
import sys
import urllib.error
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from pathlib import Path
from urllib.request import HTTPSHandler

from router.http.middleware.api_keys import ApiKeys
from services.commands.admin_client import NoServer, ServerFields, json_object
from services.commands.doctor.report import Check, bad, good, warning
from services.processes.listener import ListenError, listen
from services.ranks.keepers import SSH
from shared.network.allow_list import AllowListError, read_allow_list
from shared.network.curve import ALLOW_LIST, CurveError, EngineKeys, load_pair
from shared.network.hostfile import HostfileError, RankHost, read_hostfile
from shared.network.named_address import is_named
from shared.network.opener import opener
from shared.settings import Settings
from shared.version import installed_version

_TIMEOUT_S = 5
_SSH_TIMEOUT_S = 20


def checks(options: Settings) -> Iterator[Check]:
    yield from _http(options)
    for flag, addresses in (
        ("--engine-socket", options.engine_socket),
        ("--kvstore-socket", options.kvstore_socket),
    ):
        for address in addresses:
            yield _socket(flag, address)
    if options.curve_dir is not None:
        yield from _curve_keys(options.curve_dir)
    if options.ssl_certfile is not None:
        yield _certificate(options)
    yield from _api_keys(options)
    if options.distributed_hostfile is not None:
        yield from _hosts(options.distributed_hostfile)


def _http(options: Settings) -> Iterator[Check]:
    try:
        listen(options.listen_host, options.port).close()
    except ListenError as error:
        running = _running_server(options)
        if running is None:
            yield bad("http", str(error), "find the process that uses it: lsof -i, or ss -ltnp")
            return
        text = f"{error}: mlx-lm-server {running['version']} is running there"
        yield warning("http", text, "stop it, or choose another --port")
        yield from _versions(running)
        return
    yield good("http", f"{options.listen_host}:{options.port} is free")


def _running_server(options: Settings) -> ServerFields | None:
    """Return the health of an mlx-lm-server at this port, None if there is none."""
    scheme = "http" if options.ssl_certfile is None else "https"
    given = options.listen_host
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(given, given)
    url = f"{scheme}://{host}:{options.port}{options.root_path}/health"
    own = ssl.create_default_context()
    own.check_hostname, own.verify_mode = False, ssl.CERT_NONE  # no secrets are sent
    try:
        with opener(HTTPSHandler(context=own)).open(url, timeout=_TIMEOUT_S) as answer:
            text = answer.read()
    except urllib.error.HTTPError as error:  # a server that is not ready responds with 503
        text = error.read()
    except (OSError, ValueError, HTTPException):
        return None
    found = json_object(text)
    return found if found is not None and {"version", "models"} <= found.keys() else None


def _versions(running: ServerFields) -> Iterator[Check]:
    """Compare the versions of the running processes with this one."""
    own, remedy = installed_version(), "install the same version everywhere, and restart"
    if running["version"] != own:
        text = f"the running server has version {running['version']}, this installation {own}"
        yield warning("versions", text, remedy)
    try:
        for engine in (each for model in running["models"] for each in model["engines"]):
            if engine["version"] != running["version"]:
                text = (
                    f"engine {engine['name']} has version {engine['version']}, its router "
                    f"{running['version']}"
                )
                yield bad("versions", text, remedy)
    except NoServer as error:  # without one of these fields
        yield bad("versions", str(error), remedy)


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


def _certificate(options: Settings) -> Check:
    assert options.ssl_certfile is not None
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(options.ssl_certfile, options.ssl_keyfile)
    except (ssl.SSLError, OSError) as error:
        remedy = "pass a certificate and its private key, both as PEM files"
        return bad("TLS", f"--ssl-certfile, --ssl-keyfile: {error}", remedy)
    return good("TLS", str(options.ssl_certfile))


def _api_keys(options: Settings) -> Iterator[Check]:
    try:
        keys = ApiKeys(options)
    except (OSError, ValueError) as error:
        yield bad("API keys", str(error), "docs/operations.md describes the format of a key file")
        return
    if keys:
        yield good("API keys", "are required")


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
    found = _output([*SSH, host.ssh, f"{shlex.quote(host.python or sys.executable)} --version"])
    if found.startswith("Python "):
        return good("hosts", f"{host.ssh}: {found}")
    remedy = f"ssh {host.ssh} must work without a password, with the same installation there"
    return bad("hosts", f"cannot use {host.ssh}: {found}", remedy)


def _output(command: Sequence[str]) -> str:
    """Return the last line of the output of ``command``."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SSH_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no response within {_SSH_TIMEOUT_S} s"
    lines = (done.stdout + done.stderr).strip().splitlines()
    return lines[-1] if lines else f"ssh exited with code {done.returncode}"
