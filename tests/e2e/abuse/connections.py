"""Attacks of `tests.e2e.abuse` on connections: how requests are framed, and how slowly they come.

What an attack must not reach raises `FramingError`.
"""

from __future__ import annotations

import errno
import random
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack

from tests.e2e.abuse.attack import Attack
from tests.e2e.fuzz.framing import FramingError, exchange

TRAILERS_BYTES = 32 * 2**20
STALLED_BODIES = 100
MAX_CONNECTIONS = 600
"""Those of an address, by a flag of the server."""
OTHER_ADDRESS = "127.0.0.2"
SLOW_FOR_S, SILENT_CONNECTIONS = 2.0, 40
RANDOM_FRAMING = "random framing"
"""The one whose answers are compared: they are those of a server with keys."""
DISTURBED = (429, 503)
"""Statuses of a server that is ending or starting."""


def _random_framing(attack: Attack) -> str:
    exchange(attack.port, attack.key, str(random.random()), also=DISTURBED)
    return "framed"


def _endless(start: bytes, more: bytes, kind: str) -> Callable[[Attack], str]:
    """Send ``start``, then ``more`` until the server closes the connection."""

    def send(attack: Attack) -> str:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"
        with attack.connect() as client:
            try:
                client.sendall(
                    head + f"Authorization: Bearer {attack.key}\r\n\r\n".encode() + start
                )
                for _ in range(TRAILERS_BYTES // len(more)):
                    client.sendall(more)
            except OSError:
                return "closed"
        raise FramingError(f"{TRAILERS_BYTES} bytes of {kind} were read")

    return send


def _after_its_answer(attack: Attack) -> str:
    """Send the most of a body after its answer, then another request on that connection."""
    size = 2**20
    with attack.connect() as client:
        client.sendall(attack.head("/no/such/path", size))
        first = client.recv(65536)
        client.sendall(bytes(size))
        client.sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        found = b""
        while piece := client.recv(65536):
            found += piece
    statuses = [part[:3] for part in (first + found).split(b"HTTP/1.1 ")[1:]]
    if statuses not in ([b"404", b"200"], [b"503", b"200"], [b"404"], [b"503"]):
        raise FramingError(f"a body after its answer: {statuses}")
    return "200" if len(statuses) == 2 else "closed"


def _slowly(data: Callable[[Attack], bytes]) -> Callable[[Attack], str]:
    """Send a byte now and then, and leave."""

    def send(attack: Attack) -> str:
        with attack.connect() as client:
            content = data(attack)
            client.sendall(content[:-50])
            end = time.monotonic() + SLOW_FOR_S
            for byte in content[-50:]:
                if time.monotonic() > end:
                    break
                client.sendall(bytes([byte]))
                time.sleep(0.05)
        return "left"

    return send


def _silent(attack: Attack) -> str:
    with ExitStack() as stack:
        for number in range(SILENT_CONNECTIONS):
            client: socket.socket = stack.enter_context(attack.connect())
            if number % 2:
                client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n")
        time.sleep(1)
    return "left"


def _more_than_an_address_may_have(attack: Attack) -> str:
    """Open connections from another address of this machine, and hold them."""
    with ExitStack() as stack:
        try:
            opened = [
                stack.enter_context(attack.connect(source=OTHER_ADDRESS))
                for _ in range(MAX_CONNECTIONS + 100)
            ]
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:  # macOS has 127.0.0.1 alone
                return "no other address"
            raise
        time.sleep(1)
        open_ = sum(map(_is_open, opened))
        if open_ > MAX_CONNECTIONS:
            raise FramingError(f"{open_} connections of one address")
    return "left"


def _is_open(client: socket.socket) -> bool:
    client.setblocking(False)
    try:
        return bool(client.recv(1))
    except BlockingIOError:
        return True
    except OSError:
        return False


def _all_but_the_last_byte(attack: Attack) -> str:
    """Send bodies of a megabyte, each without its end, and hold them."""
    size = 10**6
    with ExitStack() as stack:
        for _ in range(STALLED_BODIES):
            client: socket.socket = stack.enter_context(attack.connect())
            try:
                client.sendall(attack.head("/v1/completions", size) + bytes(size - 1))
            except OSError:  # refused while it was still sent
                pass
        time.sleep(1)
    return "left"


def connection_abuses() -> Mapping[str, Callable[[Attack], str]]:
    """Return the list, by name."""
    body = b'{"prompt": "' + b"x" * 5000 + b'"}'
    return {
        RANDOM_FRAMING: _random_framing,
        "trailers without end": _endless(b"0\r\na: ", b"b" * 65536, "a trailer"),
        "extensions of a chunk without end": _endless(b"4;a=", b"b" * 65536, "an extension"),
        "a body after its answer": _after_its_answer,
        "a slow body": _slowly(lambda attack: attack.head("/v1/completions", len(body)) + body),
        "slow headers": _slowly(lambda attack: attack.head("/v1/completions", 10)),
        "connections that say little": _silent,
        "more connections than an address may have": _more_than_an_address_may_have,
        "bodies without their last byte": _all_but_the_last_byte,
    }
