"""A collector of OpenTelemetry traces: OTLP over HTTP, in a thread of this process."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class CollectedSpan(NamedTuple):
    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    seconds: float
    ended_ns: int
    attributes: dict[str, str]


class Collector:
    """The spans that have come so far, at ``url``."""

    def __init__(self) -> None:
        self.spans: list[CollectedSpan] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                assert self.path == "/v1/traces"
                collector._take(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def trace(self, trace_id: str) -> dict[str, CollectedSpan]:
        """Return the spans of a trace by name."""
        return {span.name: span for span in list(self.spans) if span.trace_id == trace_id}

    def _take(self, request: ExportTraceServiceRequest) -> None:
        for resource in request.resource_spans:
            known = {each.key: each.value.string_value for each in resource.resource.attributes}
            for scope in resource.scope_spans:
                for span in scope.spans:
                    values = {
                        each.key: each.value.string_value or str(each.value.int_value)
                        for each in span.attributes
                    }
                    self.spans.append(
                        CollectedSpan(
                            known["service.name"],
                            span.name,
                            span.trace_id.hex(),
                            span.span_id.hex(),
                            span.parent_span_id.hex(),
                            (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9,
                            span.end_time_unix_nano,
                            values,
                        )
                    )


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()
