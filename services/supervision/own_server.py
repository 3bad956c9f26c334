"""A complete server that another program starts for itself, and that exits with that program."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from services.processes.listener import listen
from shared import settings
from shared.flags import FlagError
from shared.network.opener import opener
from shared.paths import python_path
from shared.supervisor_link import HTTP_VARIABLE, LINK_VARIABLE

PROG = "mlx-lm-server"
_POLL_S = 0.1
_STOP_WITHIN_S = 30.0
"""Time after which a server that was told to stop is killed."""
_KEPT_CHARACTERS = 4000
_TLS_VARIABLES = ("MLX_LM_SERVER_SSL_CERTFILE", "MLX_LM_SERVER_SSL_KEYFILE")
"""Not for a private server, whose URL is http."""


class OwnServerFailed(Exception):
    """The server exited, or cannot be started; the message has its last output, or the reason."""


def check(flags: Sequence[str]) -> None:
    """Raise `OwnServerFailed` if ``flags``, or the file that they name, are invalid or set TLS."""
    try:
        found, _, _ = settings.read(flags, _environment(), PROG)
    except FlagError as error:
        raise OwnServerFailed(str(error)) from None
    if found.ssl_certfile is not None:
        raise OwnServerFailed(
            "--ssl-certfile: this server is private and has no TLS: remove it from the flags or "
            "the --config file"
        )


def arguments(
    flags: Sequence[str], http: socket.socket, link: socket.socket, **variables: str
) -> tuple[list[str], dict[str, Any]]:
    """Return the command of a server, and the arguments to start it (for subprocess and asyncio).

    It listens on ``http``, and exits when the other end of ``link`` is closed for any reason.
    ``variables`` are added to its environment."""
    descriptors = {HTTP_VARIABLE: http.fileno(), LINK_VARIABLE: link.fileno()}
    command = [sys.executable, "-P", "-m", "services.supervision.local", "--host=127.0.0.1", *flags]
    numbers = {name: str(number) for name, number in descriptors.items()}
    environment = {**_environment(), "PYTHONPATH": python_path(), **variables, **numbers}
    started = {
        "env": environment,
        "stdin": subprocess.DEVNULL,
        "pass_fds": tuple(descriptors.values()),
        "process_group": 0,
    }
    return command, started


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in _TLS_VARIABLES}


@contextmanager
def own_server(flags: Sequence[str], **variables: str) -> Iterator[str]:
    """Run a server until the end of the block; yield its URL once it is ready.

    Raises `OwnServerFailed` if its flags are invalid, or if it exits before."""
    check(flags)
    link, child_end = socket.socketpair()
    with tempfile.TemporaryFile() as written, link:
        with listen("127.0.0.1", 0) as http, child_end:
            command, started = arguments(flags, http, child_end, **variables)
            url = f"http://127.0.0.1:{http.getsockname()[1]}"
            process = subprocess.Popen(command, **started, stdout=written, stderr=written)
        try:
            while not _is_ready(url):
                if process.poll() is not None:
                    written.seek(0)
                    text = written.read().decode(errors="replace")[-_KEPT_CHARACTERS:].strip()
                    raise OwnServerFailed(
                        f"the server exited with code {process.returncode}: {text}"
                    )
                time.sleep(_POLL_S)
            yield url
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_STOP_WITHIN_S)
            except subprocess.TimeoutExpired:
                process.kill()  # its children exit with the link to it
                process.wait()


def _is_ready(url: str) -> bool:
    try:
        with opener().open(f"{url}/readyz", timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False
