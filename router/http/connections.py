"""Time and size limits for headers: uvicorn alone would wait for them without end."""

from __future__ import annotations

import asyncio
import uuid
from http import HTTPStatus
from typing import ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from router.errors import ApiError, HeadersTimeout, HeadersTooLarge, InvalidRequest


class Connection(HttpToolsProtocol):
    """The connection of one client. Between an answer and the next byte, uvicorn's own keep-alive
    timeout applies."""

    headers_timeout_s: ClassVar[float] = 30.0
    """For complete headers, from the connection's start or the first byte after an answer."""
    max_header_bytes: ClassVar[int] = 64 * 1024
    """Approximate: bytes are counted as they arrive."""

    _headers_timer: asyncio.TimerHandle | None = None
    _header_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_headers_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._headers_timer is None:
            if not self._responding:
                self._expect_headers()  # only blank lines came
            return
        self._header_bytes += len(data)
        if self._header_bytes > self.max_header_bytes:
            self._respond_and_close(
                HeadersTooLarge(f"Headers are over {self.max_header_bytes} bytes.")
            )

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._expect_headers()

    def on_headers_complete(self) -> None:
        self._cancel_headers_timer()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        self._respond_and_close(InvalidRequest("This is not valid HTTP.", code="invalid_http"))

    def _expect_headers(self) -> None:
        if self._headers_timer is None:
            self._header_bytes = 0
            self._start_headers_timer()

    def _start_headers_timer(self) -> None:
        self._headers_timer = self.loop.call_later(self.headers_timeout_s, self._on_headers_timeout)

    def _cancel_headers_timer(self) -> None:
        if self._headers_timer is not None:
            self._headers_timer.cancel()
            self._headers_timer = None

    @property
    def _responding(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _on_headers_timeout(self) -> None:
        if self._responding:
            # The headers are those of the next request; the current one may take its time.
            self._start_headers_timer()
        elif self._header_bytes:
            seconds = f"{self.headers_timeout_s:g} s"
            self._respond_and_close(HeadersTimeout(f"The headers did not arrive within {seconds}."))
        else:
            self.transport.close()

    def _respond_and_close(self, error: ApiError) -> None:
        """Answer input that did not become a request, and close. While an answer is being
        sent, only close."""
        if self._responding and self.cycle.response_started:
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
