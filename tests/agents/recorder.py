"""A proxy that keeps the bodies that an agent sends, between the agent and a server."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

import msgspec

_PIECE_BYTES = 1 << 16
_NOT_SENT = ("connection", "content-length", "host", "transfer-encoding")
_NOT_RETURNED = ("connection", "transfer-encoding")
_TIMEOUT_S = 300


class Request(NamedTuple):
    """One that an agent sent. Those to `/v1/models` and the like are not kept."""

    path: str
    body: dict[str, Any]


class Recorder(ThreadingHTTPServer):
    """Listens on a free port of 127.0.0.1, and passes all on to the server at ``upstream``."""

    daemon_threads = True

    def __init__(self, upstream: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream = upstream
        self.requests: list[Request] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@contextmanager
def recording(upstream: int) -> Iterator[Recorder]:
    """Run a recorder in a thread."""
    recorder = Recorder(upstream)
    thread = threading.Thread(target=recorder.serve_forever)
    thread.start()
    try:
        yield recorder
    finally:
        recorder.shutdown()
        thread.join()
        recorder.server_close()


class _Handler(BaseHTTPRequestHandler):
    """Each request has a connection of its own, whose end ends the one to the server."""

    def _pass_on(self) -> None:
        assert isinstance(self.server, Recorder)
        self.close_connection = True
        size = int(self.headers["content-length"] or 0)
        body = self.rfile.read(size)
        path = self.path.partition("?")[0]
        if body:
            self.server.requests.append(Request(path, msgspec.json.decode(body)))
        kept = {k: v for k, v in self.headers.items() if k.lower() not in _NOT_SENT}
        upstream = http.client.HTTPConnection("127.0.0.1", self.server.upstream, timeout=_TIMEOUT_S)
        try:
            upstream.request(self.command, self.path, body or None, kept)
            answer = upstream.getresponse()
            self.send_response_only(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in _NOT_RETURNED:
                    self.send_header(name, value)
            self.send_header("connection", "close")
            self.end_headers()
            while piece := answer.read1(_PIECE_BYTES):
                self.wfile.write(piece)
        except OSError:
            pass  # the agent is gone
        finally:
            upstream.close()

    do_GET = do_HEAD = do_POST = _pass_on

    def log_message(self, format: str, *args: object) -> None: ...
