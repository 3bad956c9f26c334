"""Random framing of HTTP requests on one connection: bodies with a length or in chunks, cut into
pieces anywhere, pipelined, answered before their end; then an end that no client means well.

A request asks for a model that does not exist, by a name of its own: its answer shows that body and
answer belong together, and needs no engine.
"""

from __future__ import annotations

import json
import random
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

PATIENCE_S = 60.0
TOO_MUCH = 4 * 2**20
"""Bytes of headers, trailers or extensions of chunks that no server has to read."""
_PIECE = 2**16
_UNREAD = 3 * 2**16
"""Bytes of a body that are sent after its answer: more than headers may have."""


class FramingError(Exception):
    """The server has not done what the sent bytes mean."""


class ConnectionEnded(OSError):
    """The server has closed the connection, or is gone."""


@dataclass(frozen=True)
class Request:
    """A request, in the pieces in which it is sent, and its answer."""

    early: bytes
    """What is sent before the answer is awaited."""
    late: bytes
    status: int
    text: str
    """A part of the answer's body."""


@dataclass(frozen=True)
class End:
    """Bytes after which the server has to close the connection."""

    name: str
    start: bytes
    more: bytes = b""
    """Sent again and again."""
    statuses: tuple[int, ...] = ()
    """Of the last answer, if there is one."""


class Peer:
    """A connection to the server."""

    def __init__(self, port: int, draw: random.Random) -> None:
        self._draw = draw
        self._received = b""
        try:
            self._socket = socket.create_connection(("127.0.0.1", port), PATIENCE_S)
        except OSError as error:
            raise ConnectionEnded(str(error)) from error
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def close(self) -> None:
        self._socket.close()

    def send(self, data: bytes) -> None:
        """Send ``data`` in random pieces. Raises: `ConnectionEnded`."""
        draw = self._draw
        cuts = sorted(draw.randrange(len(data) + 1) for _ in range(draw.choice((0, 1, 3, 9))))
        if len(data) < 300 and draw.random() < 0.1:
            cuts = list(range(len(data)))
        for begin, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
            try:
                self._socket.sendall(data[begin:end])
            except OSError as error:
                raise ConnectionEnded(str(error)) from error
            if cuts:
                time.sleep(draw.choice((0, 0, 0.001)))

    def answer(self) -> tuple[int, str]:
        """Return status and body of the next answer. Raises: `ConnectionEnded`, `FramingError`."""
        head = b"HTTP/1.1 100 "
        while head.startswith(b"HTTP/1.1 100 "):
            while b"\r\n\r\n" not in self._received:
                self._receive()
            head, _, self._received = self._received.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines)
        if not first.startswith("HTTP/1.1 ") or "content-length" not in headers:
            raise FramingError(f"no answer: {head!r}")
        size = int(headers["content-length"])
        while len(self._received) < size:
            self._receive()
        body, self._received = self._received[:size], self._received[size:]
        return int(first.split()[1]), body.decode()

    def is_silent(self) -> bool:
        """Return whether nothing has arrived that was not asked for."""
        self._socket.setblocking(False)
        try:
            self._receive()
        except (BlockingIOError, ConnectionEnded):
            pass
        finally:
            self._socket.settimeout(PATIENCE_S)
        return not self._received

    def _receive(self) -> None:
        try:
            received = self._socket.recv(_PIECE)
        except BlockingIOError:
            raise
        except TimeoutError as error:
            raise FramingError(f"no answer and no end within {PATIENCE_S:g} s") from error
        except OSError as error:
            raise ConnectionEnded(str(error)) from error
        if not received:
            raise ConnectionEnded("closed")
        self._received += received


def make_request(draw: random.Random, key: str, *, is_pipelined: bool) -> Request:
    """Return a request that is framed well."""
    name = f"model-{draw.randrange(10**9)}"
    size = draw.choice((0, 1, 100, 5000) if is_pipelined else (0, 1, 100, 5000, 2**16, 2**18))
    body = json.dumps({"model": name, "prompt": "x" * size}).encode()
    lines = [b"Host: x", b"Content-Type: application/json"]
    is_chunked = draw.random() < 0.5
    lines += [b"Transfer-Encoding: chunked"] if is_chunked else [b"Content-Length: %d" % len(body)]
    if draw.random() < 0.1:
        lines.append(b"Expect: 100-continue")
    if draw.random() < 0.1 and not is_pipelined:  # as some clients ask for HTTP/2
        lines += [b"Connection: Upgrade", b"Upgrade: h2c"]
    draw.shuffle(lines)
    content = b"".join(_chunks(body, draw)) if is_chunked else body
    blank = draw.choice((b"", b"", b"\r\n"))
    kind = draw.choice(("whole", "whole", "no key", "no path"))
    status, text = 401 if kind == "no key" else 404, name if kind == "whole" else ""
    path = b"/no/such/path" if kind == "no path" else b"/v1/completions"
    if kind != "no key":
        lines.append(b"Authorization: Bearer %s" % key.encode())
    head = blank + b"\r\n".join([b"POST %s HTTP/1.1" % path, *lines, b"", b""])
    if text or is_pipelined or draw.random() < 0.3:  # others are answered before their end
        return Request(head + content, b"", status, text)
    if draw.random() < 0.5 and not is_chunked:
        head = head.replace(b"Length: %d" % len(body), b"Length: %d" % (len(body) + _UNREAD))
        content += bytes(_UNREAD)
    cut = draw.randrange(len(content) + 1)
    return Request(head + content[:cut], content[cut:], status, text)


def _chunks(body: bytes, draw: random.Random) -> Iterator[bytes]:
    place = 0
    while place < len(body):
        size = draw.choice((1, 7, 1000, len(body)))
        piece = body[place : place + size] if len(body) < 200 * size else body[place:]
        form = draw.choice((b"%x", b"%X", b"%06x"))
        extension = draw.choice((b"", b"", b";a", b';name="value"'))
        yield form % len(piece) + extension + b"\r\n" + piece + b"\r\n"
        place += len(piece)
    yield b"0\r\n" + draw.choice((b"", b"", b"a: trailer\r\n", b"a: b\r\nc: d\r\n")) + b"\r\n"


def make_end(draw: random.Random, key: str) -> End:
    """Return an end that the server has to refuse."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
    if draw.random() < 0.5:
        head += b"Authorization: Bearer %s\r\n" % key.encode()
    chunked = head + b"Transfer-Encoding: chunked\r\n\r\n"
    filler = draw.choice((b"b" * _PIECE, b"b" * 1000, b"b\r\nc:" * 5000))
    part = draw.choice((b"", b"4\r\nbody\r\n"))
    # Others than 431 and 400: the answer to a request of which no more than its head was needed.
    too_large, bad = (431, 401, 400), (400, 401)
    ends = [
        End("a trailer without end", chunked + part + b"0\r\na: ", filler, too_large),
        End("the name of a trailer without end", chunked + part + b"0\r\na", b"b" * 999, too_large),
        End("a chunk's extension without end", chunked + part + b"4;a=", b"b" * 9999, too_large),
        End("headers without end", head, b"a: b\r\n" * 100, too_large),
        End("a header without end", head + b"a: ", b"b" * 9999, too_large),
        End("a path without end", b"GET /", b"b" * 9999, (*too_large, 414)),
        End("a flood of headers", head + b"a:b\r\n" * 9000 + b"\r\n", b"", too_large),
        End("a bad size of a chunk", chunked + part + b"no size\r\n", b"", bad),
        End("a size of a chunk beyond all", chunked + b"f" * 17 + b"\r\n", b"", bad),
        End("a chunk longer than its size", chunked + b"4\r\nbodyandmore\r\n", b"", bad),
        End("HTTP/2", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"", (400, 505)),
        End("no HTTP", b"\x16\x03\x01 this is TLS\r\n\r\n", b"", bad),
        *(
            End(f"headers that frame a body in two ways: {lines!r}", head + lines, b"", bad)
            for lines in (
                b"Content-Length: 4\r\nContent-Length: 5\r\n\r\nbody!",
                b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nbody\r\n0\r\n\r\n",
                b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n4\r\nbody\r\n0\r\n\r\n",
                b"Transfer-Encoding: xchunked\r\n\r\n4\r\nbody\r\n0\r\n\r\n",
                b"Transfer-Encoding: chunked, gzip\r\n\r\n4\r\nbody\r\n0\r\n\r\n",
                b"Content-Length: +4\r\n\r\nbody",
                b"Content-Length: 0x4\r\n\r\nbody",
                b"Content-Length: 99999999999999999999999\r\n\r\nbody",
                b"Content-Length : 4\r\n\r\nbody",
            )
        ),
    ]
    return draw.choice(ends)


def exchange(
    port: int,
    key: str,
    seed: str,
    noted: Callable[[str], None] = lambda _: None,
    also: tuple[int, ...] = (),
) -> None:
    """Send a few requests and an end on one connection, and compare the answers, which may have the
    statuses ``also``, too. ``noted`` gets the name of each part that was as it has to be.

    Raises: `FramingError`, `ConnectionEnded`."""
    draw = random.Random(seed)
    peer = Peer(port, draw)
    try:
        for _ in range(draw.randrange(4)):
            _requests(peer, draw, key, noted, also)
        if draw.random() < 0.2:  # a request of which only half is sent
            request = make_request(draw, key, is_pipelined=True)
            peer.send(request.early[: draw.randrange(len(request.early))])
            noted("half a request")
        elif draw.random() < 0.8:
            _end(peer, make_end(draw, key), noted, also)
    finally:
        peer.close()


def _requests(
    peer: Peer,
    draw: random.Random,
    key: str,
    noted: Callable[[str], None],
    also: tuple[int, ...],
) -> None:
    count = draw.choice((1, 1, 1, 2, 6))
    requests = [make_request(draw, key, is_pipelined=count > 1) for _ in range(count)]
    peer.send(b"".join(request.early for request in requests))
    for request in requests:
        status, body = peer.answer()
        if status not in also and (status != request.status or request.text not in body):
            raise FramingError(f"{status} {body} to {request.early[:300]!r}")
    noted("pipelined requests" if count > 1 else "a request")
    (*_, last) = requests
    if last.late:
        peer.send(last.late)
        noted("a body after its answer")
    if not peer.is_silent():
        raise FramingError(f"an answer to nothing, after {last.early[:300]!r}")


def _end(peer: Peer, end: End, noted: Callable[[str], None], also: tuple[int, ...]) -> None:
    """Send ``end``, and read until the server has closed. Raises: `FramingError`."""
    sent, statuses = 0, []
    try:
        peer.send(end.start)
        while end.more:
            peer.send(end.more)
            sent += len(end.more)
            if sent > TOO_MUCH:
                raise FramingError(f"{end.name}: {sent} bytes were read")
    except ConnectionEnded:
        pass  # its answer may be lost with the connection
    try:
        while True:
            statuses.append(peer.answer()[0])
    except ConnectionEnded:
        pass
    if len(statuses) > 1 or not {*statuses} <= {*end.statuses, *also}:
        raise FramingError(f"{end.name}: answers {statuses}")
    noted(end.name)


def fuzz_framing(port: int, key: str, count: int, seed: int) -> tuple[Counter[str], Sequence[str]]:
    """Use ``count`` connections. Return how often each kind of request was sent and answered as it
    has to be, and what was wrong."""
    noted: Counter[str] = Counter()
    wrong = []
    for number in range(count):
        name = f"{seed} {number}"
        try:
            exchange(port, key, name, lambda kind: noted.update([kind]))
        except (FramingError, ConnectionEnded) as error:
            wrong.append(f"framing, seed {name!r}: {type(error).__name__}: {error}")
    return noted, wrong
