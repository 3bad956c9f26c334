"""The spans of sequences, from the messages of the IO thread."""

from __future__ import annotations

from typing import Any

import pytest

from engine.io.traces import SequenceTraces
from shared import wire
from tests.router.scripted_engine import make_submit


class Spans:
    """Stands for `shared.tracing.Tracing`: the spans that were ended, with their attributes."""

    def __init__(self) -> None:
        self.ended: list[tuple[str, dict[str, Any]]] = []

    def begin(self, name: str, traceparent: str) -> str:
        return traceparent

    def end(self, span: str, attributes: dict[str, Any], *, error: str) -> None:
        self.ended.append((span, attributes))


@pytest.mark.parametrize(("attempt", "ends"), [(None, True), (1, True), (0, False)])
def test_the_span_of_an_aborted_sequence_ends(attempt: int | None, ends: bool) -> None:
    spans: Any = Spans()
    traces = SequenceTraces(spans, "engine-0")
    traces.on_received(make_submit("a", attempt=1, traceparent="00-a"))
    traces.on_received(wire.Abort(request_id="a", attempt=attempt))
    traces.on_received(wire.Abort(request_id="unknown"))
    assert [span for span, _ in spans.ended] == ["00-a"] * ends
