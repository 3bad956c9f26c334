"""Connections that ask for nothing: uvicorn alone would wait for ever for a request to begin,
or for its headers to end."""

from __future__ import annotations

import asyncio
import uuid
from http import HTTPStatus
from typing import ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from router.errors import ApiError, HeadersTooLarge, HeadersTooSlow, InvalidRequest


class Connection(HttpToolsProtocol):
    """One client's. From its beginning, and from the first byte after an answer, headers have
    ``headers_timeout_s`` to arrive whole, and not more than about ``max_header_bytes``;
    between answer and next byte uvicorn's own keep-alive counts."""

    headers_timeout_s: ClassVar[float] = 30.0
    max_header_bytes: ClassVar[int] = 64 * 1024

    _due: asyncio.TimerHandle | None = None
    _header_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._headers_came()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._due is None:
            if not self._answering:
                self._expect_headers()  # what came were blank lines
            return
        self._header_bytes += len(data)
        if self._header_bytes > self.max_header_bytes:
            self._refuse(HeadersTooLarge(f"Headers are over {self.max_header_bytes} bytes."))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._expect_headers()

    def on_headers_complete(self) -> None:
        self._headers_came()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(InvalidRequest("This is not valid HTTP.", code="invalid_http"))

    def _expect_headers(self) -> None:
        if self._due is None:
            self._header_bytes = 0
            self._wait()

    def _wait(self) -> None:
        self._due = self.loop.call_later(self.headers_timeout_s, self._give_up)

    def _headers_came(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _give_up(self) -> None:
        if self._answering:
            self._wait()  # these are of the next request, and this one may take its time
        elif self._header_bytes:
            seconds = f"{self.headers_timeout_s:g} s"
            self._refuse(HeadersTooSlow(f"The headers did not arrive within {seconds}."))
        else:
            self.transport.close()

    def _refuse(self, error: ApiError) -> None:
        """Answers what did not become a request, and closes; in the midst of an answer it
        only closes."""
        if self._answering and self.cycle.response_started:
            self.transport.close()
            return
        body = error.body()
        head = (
            f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}",
            "content-type: application/json",
            f"content-length: {len(body)}",
            f"x-request-id: req_{uuid.uuid4().hex}",
            "connection: close",
        )
        self.transport.write("\r\n".join([*head, "", ""]).encode() + body)
        self.transport.close()
