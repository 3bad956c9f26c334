"""Many streams at once, read by one thread at low cost."""

from __future__ import annotations

import json
import selectors
import socket
import time
from contextlib import suppress

HOST = "127.0.0.1"
OPEN_AT_ONCE = 50
"""Number of streams started before the first of them has answered."""
PATIENCE_S = 120.0
EVENT = b"data: {"


class Streams:
    """Streamed chats on one server. ``counts`` has the number of events that each has received."""

    def __init__(self, port: int, models: int, max_tokens: int = 30_000) -> None:
        self._port, self._models, self._max_tokens = port, models, max_tokens
        self._selector = selectors.DefaultSelector()
        self._sockets: list[socket.socket] = []
        self.counts: list[int] = []
        self.first = bytearray()
        """The data of the first stream."""
        self.gaps_s: list[float] = []
        """The times between two pieces of one stream, while `read` records them."""
        self._last: list[bytes] = []
        self._last_at: list[float] = []

    def open(self, count: int) -> None:
        """Start ``count`` streams, and return when each has received events."""
        deadline = time.monotonic() + PATIENCE_S
        for number in range(count):
            self._begin(number)
            while self.counts.count(0) >= OPEN_AT_ONCE or (
                number == count - 1 and 0 in self.counts
            ):
                assert time.monotonic() < deadline, f"{self.counts.count(0)} streams did not begin"
                self._receive(0.05)

    def read(self, seconds: float) -> int:
        """Read for some ``seconds``, and return the number of events."""
        before, until = sum(self.counts), time.monotonic() + seconds
        self.gaps_s.clear()
        self._last_at = [0.0] * len(self.counts)
        while (left_s := until - time.monotonic()) > 0:
            self._receive(left_s)
        return sum(self.counts) - before

    def close(self) -> None:
        for each in self._sockets:
            with suppress(KeyError):
                self._selector.unregister(each)
            each.close()
        self._selector.close()

    def _begin(self, number: int) -> None:
        body = json.dumps(
            {
                "model": f"model-{number % self._models}",
                "messages": [{"role": "user", "content": f"This is question {number}."}],
                "max_tokens": self._max_tokens,
                "stream": True,
            }
        ).encode()
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        client = socket.create_connection((HOST, self._port), timeout=PATIENCE_S)
        client.sendall(head.encode() + body)
        client.setblocking(False)
        self._selector.register(client, selectors.EVENT_READ, number)
        self._sockets.append(client)
        self.counts.append(0)
        self._last.append(b"")
        self._last_at.append(0.0)

    def _receive(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(timeout_s):
            number: int = key.data
            data = self._sockets[number].recv(65536)
            if not data:
                raise ConnectionError(f"stream {number} ended: {self._last[number]!r}")
            self._last[number] = data[-1000:]
            self.counts[number] += data.count(EVENT)
            if number == 0:
                self.first += data
            now = time.monotonic()
            if self._last_at[number]:
                self.gaps_s.append(now - self._last_at[number])
            self._last_at[number] = now


def events_of(received: bytes) -> list[str]:
    """Return the events in the chunked body of a streamed answer, including its head, except the
    first event, which has no text."""
    found: list[str] = []
    _, _, rest = received.partition(b"\r\n\r\n")
    while True:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size, 16) if size else 0
        if not length or len(rest) < length + 2:
            return found[1:]
        found += [each + "\n\n" for each in rest[:length].decode().split("\n\n") if each]
        rest = rest[length + 2 :]
