"""The trace spans of sequences in this engine, from the messages to and from the router."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.io.inbox import RequestKey
from shared import wire
from shared.tracing import Tracing

if TYPE_CHECKING:
    from opentelemetry.trace import Span


@dataclass
class _Traced:
    span: Span
    attempt: int
    first_token_at: float | None = None


class SequenceTraces:
    """The open spans. Used on the IO thread, so that no step waits for it."""

    def __init__(self, tracing: Tracing, engine: str) -> None:
        self._tracing = tracing
        self._engine = engine
        self._traced: dict[str, _Traced] = {}

    def on_received(self, message: wire.Message) -> None:
        if isinstance(message, wire.Submit | wire.Encode) and message.traceparent:
            name = "sequence" if isinstance(message, wire.Submit) else "texts"
            span = self._tracing.begin(name, message.traceparent)
            self._traced[message.request_id] = _Traced(span, message.attempt)
        elif isinstance(message, wire.Abort):  # nothing is sent for it
            traced = self._traced.get(message.request_id)
            if traced is not None and message.attempt in (None, traced.attempt):
                self._end(message.request_id, traced.attempt, {"mlx_lm_server.aborted": True}, "")

    def on_sent(self, messages: Sequence[wire.Message]) -> None:
        if not self._traced:
            return
        for message in messages:
            if isinstance(message, wire.Tokens):
                for delta in message.deltas:
                    self._on_delta(delta)
            elif isinstance(message, wire.Encoded):
                self._on_encoded(message)
            elif isinstance(message, wire.Refused):
                self._end(message.request_id, message.attempt, {}, message.reason)

    def on_dropped(self, requests: Iterable[RequestKey]) -> None:
        """End the spans of ``requests``, whose router is gone."""
        for request_id, attempt in requests:
            self._end(request_id, attempt, {}, "the router is gone")

    def _on_delta(self, delta: wire.Delta) -> None:
        traced = self._traced.get(delta.request_id)
        if traced is None or traced.attempt != delta.attempt:
            return
        if delta.token_ids and traced.first_token_at is None:
            traced.first_token_at = time.monotonic()
        if delta.finish is None:
            return
        attributes: dict[str, str | int | float] = {"mlx_lm_server.finish": delta.finish}
        if delta.usage is not None:
            self._record_phases(traced, delta.usage)
            attributes |= {
                "gen_ai.usage.input_tokens": delta.usage.prompt_tokens,
                "gen_ai.usage.output_tokens": delta.usage.completion_tokens,
                "mlx_lm_server.cached_ram_tokens": delta.usage.cached_ram_tokens,
                "mlx_lm_server.cached_ssd_tokens": delta.usage.cached_ssd_tokens,
            }
        error = delta.error or "" if delta.finish == "error" else ""
        self._end(delta.request_id, delta.attempt, attributes, error)

    def _on_encoded(self, encoded: wire.Encoded) -> None:
        times: dict[str, str | int | float] = {
            "mlx_lm_server.queue_s": encoded.queue_s,
            "mlx_lm_server.compute_s": encoded.compute_s,
        }
        self._end(encoded.request_id, encoded.attempt, times, encoded.error or "")

    def _record_phases(self, traced: _Traced, usage: wire.Usage) -> None:
        first, parent = traced.first_token_at, self._tracing.traceparent(traced.span)
        if first is not None:
            self._tracing.record("prefill", parent, first - usage.prefill_s, first)
            self._tracing.record("decode", parent, first, time.monotonic())

    def _end(
        self, request_id: str, attempt: int, attributes: dict[str, str | int | float], error: str
    ) -> None:
        traced = self._traced.get(request_id)
        if traced is not None and traced.attempt == attempt:
            del self._traced[request_id]
            attributes |= {
                "mlx_lm_server.engine": self._engine,
                "mlx_lm_server.sequence": request_id,
                "mlx_lm_server.attempt": attempt,
            }
            self._tracing.end(traced.span, attributes, error=error)
