"""Passes of texts in MLX, as on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model

from engine.embedding import padded
from engine.embedding.padded import PaddedModel, padded_decoder
from engine.model.encoder import Text

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


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_a_long_text_is_computed_in_pieces(
    kind: str, tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = load_model(tiny_model(kind))
    texts = [Text(tuple(3 + i % 90 for i in range(length)), 0) for length in (299, 310)]
    whole, parts = computed(padded_decoder(model, causal=True), texts)
    assert parts == 1
    monkeypatch.setattr(padded, "PIECE_TOKENS", 64)
    found, parts = computed(padded_decoder(model, causal=True), texts)
    assert parts == 5
    for ours, expected in zip(found, whole, strict=True):
        np.testing.assert_allclose(ours, expected, rtol=0.02, atol=0.02)


def computed(model: PaddedModel, texts: Sequence[Text]) -> tuple[Sequence[Any], int]:
    """Return the states of ``texts``, and in how many parts they were computed."""
    work, parts = model.states(texts), 0
    while True:
        try:
            next(work)
        except StopIteration as done:
            return done.value, parts
        parts += 1
