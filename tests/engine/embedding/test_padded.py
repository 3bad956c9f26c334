"""Passes of texts in MLX, as on a GPU."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import mlx.core as mx
import pytest

from engine.embedding.padded import PaddedModel
from engine.embedding.texts import Text

NO_MEMORY = "[METAL] Command buffer execution failed: Insufficient Memory."


def test_a_pass_does_not_leave_its_error_to_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Metal may report only after `mx.eval` that it failed. Another pass may be computed between
    two layers, and would get the error; this one would go on with what was never written."""

    def forward(texts: Sequence[Text], width: int) -> Generator[mx.array, None, mx.array]:
        x = mx.ones((len(texts), width, 4))
        yield x
        return x

    errors = iter([RuntimeError(NO_MEMORY)])

    def synchronize() -> None:
        for error in errors:
            raise error

    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    monkeypatch.setattr(mx, "synchronize", synchronize)
    model = PaddedModel(forward)
    outer, inner = (model.states([Text((5, 6, 7), 0)]) for _ in range(2))
    with pytest.raises(RuntimeError, match="Insufficient Memory"):
        next(outer)
    next(inner)
    with pytest.raises(StopIteration):
        next(inner)
