"""Limits of a connection: uvicorn alone would wait forever for headers and for slow readers."""

from __future__ import annotations

import asyncio
import uuid
from http import HTTPStatus
from typing import ClassVar, cast

import httptools
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from router.errors import (
    ApiError,
    HeadersTimeout,
    HeadersTooLarge,
    Http2NotSupported,
    InvalidRequest,
)
from router.http.acceptor import EndingProtocol
from router.http.client_timer import ClientTimer
from router.http.transports import DrainingTransport

_HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n"


class Connection(HttpToolsProtocol, EndingProtocol):
    """The connection of one client. Between a response and the next byte, uvicorn's own keep-alive
    timeout applies."""

    headers_timeout_s: ClassVar[float] = 30.0
    """Time limit for complete headers, from the start of the connection or the first byte after a
    response."""
    max_header_bytes: ClassVar[int] = 64 * 1024
    """Approximate: bytes are counted as they arrive."""
    max_headers: ClassVar[int] = 256
    """Limited, because each new header is compared with the others."""
    max_pipelined: ClassVar[int] = 8
    """Max requests queued behind the current one."""
    write_timeout_s: ClassVar[float] = 120.0
    """Time in which a client must read something once its buffers are full."""

    _headers_timer: ClientTimer | None = None
    _header_bytes = 0
    _in_headers = False
    """Whether the headers of a request have begun and are incomplete."""
    _message_ended = False
    """Whether a request ended in the bytes that arrived last."""
    _in_body = False
    """Whether the body of the last request is incomplete."""
    _bytes_without_body = 0
    """Bytes that arrived inside a body after its last content: extensions of a chunk, or trailers.
    The parser copies all previous bytes of a trailer for each further piece."""
    _refusal: ApiError | None = None
    """The reason why the parser was stopped; None if the input is not HTTP."""
    _answered: RequestResponseCycle | None = None
    """The request being answered. `cycle` is the last one, which may be queued behind it."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        draining = DrainingTransport(transport, self.loop, self.write_timeout_s)
        self.was_made = True
        super().connection_made(cast(asyncio.Transport, draining))
        self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.on_lost is not None:
            self.on_lost()
        self._cancel_headers_timer()
        cast(DrainingTransport, self.transport).lost()
        # uvicorn notifies only the last request: the one being answered would continue to its end.
        for cycle in (self._answered, *(cycle for cycle, _ in self.pipeline)):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self.pipeline.clear()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        cast(DrainingTransport, self.transport).watch()

    def data_received(self, data: bytes) -> None:
        self._bytes_without_body += len(data)
        self._message_ended = False
        self._parse(data)
        if self.transport.is_closing():
            return
        if self._in_body and self._bytes_without_body > self.max_header_bytes:
            self._respond_and_close(self._headers_too_large)
            return
        if self._headers_timer is None:
            if not self._responding:
                self._expect_headers()  # only blank lines arrived, or more of an unread body
            return
        if self._in_body or self._message_ended:  # then most of them may be that request's body
            return
        self._header_bytes += len(data)
        if self._header_bytes > self.max_header_bytes:
            self._respond_and_close(self._headers_too_large)

    def _parse(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self._asks_for_upgrade:
                (parsed,) = upgrade.args
                self._parse_without_upgrade(data[parsed:])
        except httptools.HttpParserError as error:
            if self.is_new and data.startswith(_HTTP2_PREFACE):
                self._refusal = Http2NotSupported()
            self.send_400_response(str(error))

    def _parse_without_upgrade(self, rest: bytes) -> None:
        """Parse a request again that asks for another protocol, which servers may ignore. Clients
        of Java's standard library do this with each request, to have HTTP/2. httptools takes none
        of them to have a body."""
        line = b"%s %s HTTP/%s" % (
            self.parser.get_method(),
            self.url,
            self.parser.get_http_version().encode(),
        )
        lines = [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        self._parse(b"\r\n".join([line, *lines, b"", rest]))

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= self.max_pipelined:
            self._stop_parser(InvalidRequest("Too many requests at once on one connection."))
        super().on_message_begin()
        self._in_headers = True
        self._expect_headers()

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if len(self.headers) > self.max_headers:
            self._stop_parser(HeadersTooLarge(f"There are more than {self.max_headers} headers."))

    def on_headers_complete(self) -> None:
        if self._asks_for_upgrade:
            return
        self._in_headers = False
        self._cancel_headers_timer()
        # They may have arrived all at once, with the end.
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > self.max_header_bytes:
            self._stop_parser(self._headers_too_large)
        self._in_body = True
        self._bytes_without_body = 0
        super().on_headers_complete()
        if self.pipeline:
            # uvicorn stops reading here, and would not notice that the client disconnects.
            self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        self._bytes_without_body = 0
        if self.pipeline and len(self.cycle.body) + len(body) > HIGH_WATER_LIMIT:
            self._stop_parser(InvalidRequest("A pipelined request has a large body."))
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._asks_for_upgrade:
            return
        self._in_body = False
        self._message_ended = True
        if self._headers_timer is not None:
            # The response came first, and the timer was for the rest of the body.
            self._cancel_headers_timer()
            self._expect_headers()
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        not_http = InvalidRequest("This is not valid HTTP.", code="invalid_http")
        self._respond_and_close(self._refusal or not_http)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    @property
    def is_new(self) -> bool:
        """Whether no request has begun on it yet."""
        return self.cycle is None

    @property
    def _asks_for_upgrade(self) -> bool:
        """Whether the request that is parsed asks for another protocol. CONNECT has no body."""
        return bool(self.parser.should_upgrade()) and self.parser.get_method() != b"CONNECT"

    @property
    def _headers_too_large(self) -> HeadersTooLarge:
        return HeadersTooLarge(f"The headers are larger than {self.max_header_bytes} bytes.")

    def _stop_parser(self, refusal: ApiError) -> None:
        """Raise out of the parser, which would otherwise continue with all received data."""
        self._refusal = refusal
        raise refusal

    def _expect_headers(self) -> None:
        if self._headers_timer is None:
            self._header_bytes = 0
            self._start_headers_timer()

    def _start_headers_timer(self) -> None:
        self._headers_timer = ClientTimer(
            self.loop, self.headers_timeout_s, self._on_headers_timeout
        )

    def _cancel_headers_timer(self) -> None:
        if self._headers_timer is not None:
            self._headers_timer.cancel()
            self._headers_timer = None

    @property
    def _responding(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _on_headers_timeout(self) -> None:
        if self._responding:
            # These are the headers of the next request; the current one may take its time.
            self._start_headers_timer()
        elif self._in_headers:
            seconds = f"{self.headers_timeout_s:g} s"
            self._respond_and_close(HeadersTimeout(f"The headers did not arrive within {seconds}."))
        else:
            self.transport.close()

    def _respond_and_close(self, error: ApiError) -> None:
        """Respond to input that did not become a request, and close. While a response is being
        sent, only close, and also if this is the rest of a request that was answered: a second
        response would be taken for that of the next one."""
        answered = self._answered
        is_sending = (
            answered is not None and answered.response_started and not answered.response_complete
        )
        if is_sending or (self._in_body and not self._responding):
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
