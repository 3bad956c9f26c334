"""The trace span of a request in the router."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.types import Scope

from router.generation.summary import summarize
from router.http.middleware.access_log import RequestRecord
from shared.tracing import Tracing

if TYPE_CHECKING:
    from opentelemetry.trace import Span


class RequestTrace:
    """The span of one request, a child of the client's span if it sent a ``traceparent``."""

    def __init__(self, tracing: Tracing, headers: Headers, record: RequestRecord) -> None:
        self._tracing = tracing
        self._record = record
        self._span: Span = tracing.begin(
            record.method, headers.get("traceparent", ""), kind="server"
        )
        self.traceparent = tracing.traceparent(self._span)

    def end(self, scope: Scope, route: str) -> None:
        """End the span, after adding one for the time in the queue. ``route`` is the path's
        template."""
        record, state = self._record, scope["state"]
        self._span.update_name(f"{record.method} {route}")
        attributes: dict[str, str | int | float] = {
            "http.request.method": record.method,
            "http.route": route,
            "http.response.status_code": record.final_status,
            "mlx_lm_server.request_id": record.request_id,
            "mlx_lm_server.key": state["tenant"].name,
        }
        if (generation := state.get("generation")) is not None:
            found = summarize(generation)
            attributes |= {
                "gen_ai.request.model": found.model,
                "gen_ai.response.id": found.id,
                "gen_ai.usage.input_tokens": found.prompt_tokens,
                "gen_ai.usage.output_tokens": found.output_tokens,
                "mlx_lm_server.cached_tokens": found.cached_tokens,
                "mlx_lm_server.finish": found.finish,
            }
            if found.arrived_at is not None:
                left_at = found.placed_at or time.monotonic()
                self._tracing.record("queue", self.traceparent, found.arrived_at, left_at)
        failed = record.final_status >= 500 or record.error_code == "client_disconnected"
        error = str(record.error_code) if failed else ""
        self._tracing.end(self._span, attributes, error=error)
