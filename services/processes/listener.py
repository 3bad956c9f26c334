"""The listening HTTP socket: created by the supervisor, or by a router that is started alone."""

from __future__ import annotations

import errno
import logging
import os
import socket
import sys
from typing import Any

from shared.settings import Settings
from shared.supervisor_link import HTTP_VARIABLE

BACKLOG = 2048


class ListenError(Exception):
    """The HTTP address is not usable; the message is one line for the user."""


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on ``host`` and ``port``. Raises `ListenError`."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ListenError(f"--host: {host!r} cannot be resolved ({reason})") from None
    # A name such as localhost has addresses of both kinds, and clients often ask 127.0.0.1.
    found.sort(key=lambda each: each[0] != socket.AF_INET)
    family, kind, protocol, _, address = found[0]
    in_use = f"--port: {port} is in use by another program; --port 0 picks a free port"
    if sys.platform == "darwin" and _is_answered(family, address):
        raise ListenError(in_use)
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ListenError(in_use) from None
        flag = "--port" if error.errno == errno.EACCES else "--host"
        raise ListenError(f"{flag}: cannot listen on {host}:{port} ({error.strerror})") from None
    return listener


def _is_answered(family: int, address: tuple[Any, ...]) -> bool:
    """Return whether a program listens on the port of ``address`` on this machine. BSD lets a
    socket of all addresses share the port of one of a single address, which then gets the
    connections."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address[0], address[0])
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        return address[1] != 0 and probe.connect_ex((host, *address[1:])) == 0


def inherited() -> socket.socket | None:
    """Return the socket passed on by the supervisor; None in a process that is started alone.

    The variable is removed from the environment, so that child processes do not use it.
    """
    number = os.environ.pop(HTTP_VARIABLE, None)
    if number is None:
        return None
    listener = socket.socket(fileno=int(number))
    listener.set_inheritable(False)
    return listener


def log_access(logger: logging.Logger, settings: Settings) -> None:
    """Log who can use the server, and how to change that."""
    host = settings.listen_host
    if settings.has_keys:
        logger.info("listening on %s for clients with an API key (change it with --host)", host)
    elif settings.host is None:
        logger.info(
            "listening on %s, for programs of this machine only, because no API key is set: serve "
            "others with --api-key-file, or without keys with --host 0.0.0.0",
            host,
        )
    else:
        logger.info("listening on %s without API keys (set them with --api-key-file)", host)


def base_url(listener: socket.socket, *, tls: bool) -> str:
    """Return the URL of the address that ``listener`` is bound to, without a path."""
    host, port = listener.getsockname()[:2]
    return f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"
