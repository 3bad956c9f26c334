"""OpenTelemetry traces (the extra ``otel``): spans of one request in several processes.

Without ``--otlp-endpoint``, nothing from OpenTelemetry is imported. With it, a separate thread
sends spans to the collector from a bounded queue: no request waits for a collector.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from shared.logs import RateLimitedLogger
from shared.version import installed_version

if TYPE_CHECKING:
    from opentelemetry.trace import Span

logger = logging.getLogger(__name__)

Attributes = Mapping[str, str | int | float]

_TIMEOUT_S = 5.0
_LOG_INTERVAL_S = 60.0


class TracingUnavailable(Exception):
    """Tracing is not available; the message is one line for the user."""


class Tracing:
    """Creates spans and sends them to a collector. Safe to use from any thread."""

    def __init__(self, endpoint: str, process: str) -> None:
        """Send to ``endpoint``, the base URL of OTLP over HTTP. Raises `TracingUnavailable`."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
            from opentelemetry.trace.propagation.tracecontext import (
                TraceContextTextMapPropagator,
            )
        except ImportError:
            raise TracingUnavailable("requires the extra 'otel'") from None

        warnings = RateLimitedLogger(logger, _LOG_INTERVAL_S)

        class Exporter(OTLPSpanExporter):
            """Reports lost spans at most once per minute; the library reports every batch."""

            def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
                result = super().export(spans)
                if result is not SpanExportResult.SUCCESS:
                    warnings.warning("cannot send traces to %s", endpoint)
                return result

        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        resource = Resource.create(
            {
                "service.name": f"mlx-lm-server {process.partition('-')[0]}",
                "service.instance.id": process,
                "service.version": installed_version(),
            }
        )
        exporter = Exporter(f"{endpoint.rstrip('/')}/v1/traces", timeout=_TIMEOUT_S)
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("mlx-lm-server")
        self._propagator = TraceContextTextMapPropagator()

    def begin(
        self,
        name: str,
        parent: str = "",
        *,
        kind: Literal["server", "internal"] = "internal",
        at: float | None = None,
    ) -> Span:
        """Begin a span under the one that ``parent`` (a ``traceparent``) names.

        Without a valid parent it begins a trace. Times are from ``time.monotonic``.
        """
        from opentelemetry.trace import SpanKind

        return self._tracer.start_span(
            name,
            context=self._propagator.extract({"traceparent": parent}),
            kind=SpanKind.SERVER if kind == "server" else SpanKind.INTERNAL,
            start_time=None if at is None else _wall_ns(at),
        )

    def traceparent(self, span: Span) -> str:
        """Return the ``traceparent`` of ``span`` for other processes."""
        from opentelemetry.trace import set_span_in_context

        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, set_span_in_context(span))
        return carrier.get("traceparent", "")

    def end(
        self, span: Span, attributes: Attributes, *, error: str = "", at: float | None = None
    ) -> None:
        """End ``span``; ``error`` is the reason if it failed."""
        from opentelemetry.trace import StatusCode

        span.set_attributes(dict(attributes))
        if error:
            span.set_status(StatusCode.ERROR, error)
        span.end(None if at is None else _wall_ns(at))

    def record(self, name: str, parent: str, began_at: float, ended_at: float) -> None:
        """Create a span for something that has ended."""
        self.begin(name, parent, at=began_at).end(_wall_ns(max(began_at, ended_at)))

    def close(self) -> None:
        """Send the queued spans, within the timeout of one request to the collector."""
        self._provider.shutdown()


def open_tracing(endpoint: str | None, process: str) -> Tracing | None:
    """Return the tracer of this process; None if tracing is off.

    Raises `TracingUnavailable`.
    """
    return None if endpoint is None else Tracing(endpoint, process)


def _wall_ns(at: float) -> int:
    return time.time_ns() - int((time.monotonic() - at) * 1e9)
