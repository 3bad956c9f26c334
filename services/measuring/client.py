"""A streaming client with little overhead, so that the server gets the CPU."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import httptools

from services.measuring.answers import EventReader, StreamedAnswer

TIMEOUT_S = 600.0
Take = Callable[[int, float, bytes], None]
"""Receives the status of the response, the time (of time.perf_counter) and a part of its body."""


class ApiClient:
    """Client of one OpenAI-compatible server. Connections are kept and reused."""

    def __init__(self, url: str, key: str = "", timeout_s: float = TIMEOUT_S) -> None:
        """``url`` may end with /v1. Raises ValueError if it is not an HTTP URL."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} does not begin with http:// or https://")
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._address = parts.hostname, parts.port or (443 if self._tls else 80)
        self._base = parts.path.rstrip("/").removesuffix("/v1") + "/v1"
        self._head = (
            f"Host: {parts.netloc.rpartition('@')[2]}\r\nContent-Type: application/json\r\n"
        )
        if key:
            self._head += f"Authorization: Bearer {key}\r\n"
        self._timeout_s = timeout_s
        self._idle: list[KeptConnection] = []

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def models(self) -> list[str]:
        """Return the names of the server's models. Raises OSError, or ValueError if the server
        refuses or responds with something else."""
        body = bytearray()
        async with asyncio.timeout(self._timeout_s):
            status = await self._exchange(
                self._request("GET", "/models"), lambda _, __, data: body.extend(data)
            )
        try:
            return [str(model["id"]) for model in json.loads(body)["data"]]
        except (ValueError, KeyError, TypeError):
            text = bytes(body[:300]).decode(errors="replace")
            raise ValueError(f"status {status} at {self._base}/models: {text}") from None

    async def stream(
        self,
        path: str,
        body: dict[str, Any],
        into: StreamedAnswer | None = None,
        on_first: Callable[[], None] = lambda: None,
    ) -> StreamedAnswer:
        """Stream an answer of the endpoint ``path``, such as /completions. Failures are recorded in
        its ``error``.

        If this is cancelled, ``into`` contains what has arrived. ``on_first`` is called with the
        first text, or at the end."""
        answer = into or StreamedAnswer()
        data = json.dumps({"stream": True, "stream_options": {"include_usage": True}, **body})
        request = self._request("POST", path, data.encode())
        reader, notified = EventReader(answer), False

        def take(status: int, at: float, piece: bytes) -> None:
            nonlocal notified
            reader.take(status, at, piece)
            if answer.times and not notified:
                notified = True
                on_first()

        answer.began = time.perf_counter()
        try:
            async with asyncio.timeout(self._timeout_s):
                reader.end(await self._exchange(request, take))
        except TimeoutError:
            answer.error = f"no answer within {self._timeout_s:g} s"
        except (OSError, ValueError) as error:
            answer.error, answer.detail = type(error).__name__, str(error)
        finally:
            answer.total_s = time.perf_counter() - answer.began
            if not notified:
                on_first()
        return answer

    def _request(self, method: str, path: str, body: bytes = b"") -> bytes:
        head = f"{method} {self._base}{path} HTTP/1.1\r\n{self._head}"
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body

    async def _exchange(self, request: bytes, take: Take) -> int:
        """Return the status of the response, and pass its body to ``take``."""
        while True:
            is_kept = bool(self._idle)
            connection = self._idle.pop() if is_kept else await self._open()
            try:
                status = await connection.exchange(request, take)
            except ConnectionError:
                if is_kept and not connection.heard:  # the server had closed it in the meantime
                    continue
                raise
            finally:
                if not connection.is_reusable:
                    connection.close()
            if connection.is_reusable:
                self._idle.append(connection)
            return status

    async def _open(self) -> KeptConnection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(KeptConnection, *self._address, ssl=self._tls)
        return connection


class KeptConnection(asyncio.Protocol):
    """A connection that carries one request at a time."""

    def __init__(self) -> None:
        self.heard = False
        """Whether anything of the response has arrived."""
        self.is_reusable = False
        self._transport: asyncio.Transport | None = None
        self._parser: Any = None
        self._done: asyncio.Future[int] | None = None
        self._take: Take = lambda *_: None
        self._at = 0.0
        self._ends_with_connection = True

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    async def exchange(self, request: bytes, take: Take) -> int:
        """Send ``request``, and return the status when its response is complete. Raises
        ConnectionError, and ValueError if the response is not HTTP."""
        self.heard, self.is_reusable, self._ends_with_connection = False, False, True
        if self._transport is None or self._transport.is_closing():
            raise ConnectionResetError("the connection was closed")
        self._parser = httptools.HttpResponseParser(self)
        self._take = take
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._done

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._at, self.heard = time.perf_counter(), True
        if self._done is None or self._done.done():
            return self.close()  # unsolicited data
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, ValueError) as error:
            self._fail(ValueError(f"invalid response: {error.__context__ or error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._done is None or self._done.done():
            return
        if self.heard and exc is None and self._ends_with_connection:
            self._done.set_result(self._parser.get_status_code())
        else:
            self._fail(exc or ConnectionResetError("the connection was lost"))

    def _fail(self, error: Exception) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)
        self.close()

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._ends_with_connection = False

    def on_body(self, body: bytes) -> None:
        self._take(self._parser.get_status_code(), self._at, body)

    def on_message_complete(self) -> None:
        assert self._done is not None
        if not self._done.done():
            self.is_reusable = bool(self._parser.should_keep_alive())
            self._done.set_result(self._parser.get_status_code())
