"""One client that means no good, of `tests.e2e.abuse`."""

from __future__ import annotations

import http.client
import socket
from typing import NamedTuple

PATIENCE_S = 60.0


class Attack(NamedTuple):
    """A client and its key, which is also its address for a server without keys behind a proxy."""

    port: int
    key: str

    def connect(
        self, receive_buffer: int | None = None, source: str | None = None
    ) -> socket.socket:
        """Return a connection from the address ``source``. Raises OSError."""
        client = socket.socket()
        client.settimeout(PATIENCE_S)
        if source is not None:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            client.bind((source, 0))
        if receive_buffer is not None:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        client.connect(("127.0.0.1", self.port))
        return client

    def head(self, path: str, size: int, *more: str) -> bytes:
        lines = (
            f"POST {path} HTTP/1.1",
            "Host: x",
            f"Authorization: Bearer {self.key}",
            f"X-Forwarded-For: {self.key}",
            "Content-Type: application/json",
            f"Content-Length: {size}",
            *more,
        )
        return "\r\n".join([*lines, "", ""]).encode()

    def post(self, path: str, body: bytes, *more: str) -> str:
        """Send a request, and read the answer to its end. Return the status."""
        with self.connect() as client:
            client.sendall(self.head(path, len(body), "Connection: close", *more) + body)
            response = http.client.HTTPResponse(client)
            response.begin()
            while response.read(65536):
                pass
            return str(response.status)
