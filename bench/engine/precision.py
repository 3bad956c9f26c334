"""The cost of ``--cpu-precision`` in answers: perplexity and most likely tokens against fp32.

The text is Python's language reference (``pydoc_data.topics``)."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from engine.backend.blas import load_fast_blas

WINDOWS_OF_A_RUN, WINDOW_TOKENS = 4, 256
MAX_PERPLEXITY, MIN_AGREEMENT = 0.005, 0.98
"""``auto`` may be ``fast`` if its perplexity is higher by at most this fraction, and at least
this fraction of the most likely tokens are the same."""


class _Found(NamedTuple):
    """The results for one window of text."""

    loss: float  # mean of -log p of the next tokens
    best: Any  # the most likely token at each position


def precision(model: str, runs: int) -> None:
    """Compare products with codes, compact and fast ones, with the same weights in fp32."""
    load_fast_blas()
    from engine import device
    from engine.model.load import load, resolve

    device.prepare()
    path = resolve(model)
    loaded = {name: load(path) for name in ("fp32", "compact", "fast")}
    models = {name: _prepared(each.model, name) for name, each in loaded.items()}
    found: dict[str, list[_Found]] = {name: [] for name in models}
    for ids in _windows(loaded["fp32"].tokenizer, runs * WINDOWS_OF_A_RUN):
        for name, each in models.items():
            found[name].append(_read(each, ids))
    tokens = sum(len(each.best) for each in found["fp32"])
    plain = _perplexity(found["fp32"])
    print(f"{model}: {tokens} tokens of Python's reference, perplexity {plain:.3f} in fp32")
    for name in ("compact", "fast"):
        more = _perplexity(found[name]) / plain - 1
        pairs = zip(found[name], found["fp32"], strict=True)
        agreed = sum(int((a.best == b.best).sum()) for a, b in pairs) / tokens
        suits = more <= MAX_PERPLEXITY and agreed >= MIN_AGREEMENT
        print(
            f"{name:7}  perplexity {more:+.3%}, the same most likely token in {agreed:.2%}"
            f"{'' if name == 'compact' else '; auto may be fast' if suits else '; auto is exact'}",
            flush=True,
        )


def _prepared(model: Any, name: str) -> Any:
    """Return ``model`` with its products in this precision, or in fp32."""
    import mlx.core as mx
    from mlx_lm.utils import dequantize_model

    from engine.cpu.layers import Layers

    if name == "fp32":
        model.set_dtype(mx.float32)
        return dequantize_model(model)
    layers = Layers(model, "fast" if name == "fast" else "compact", dense=False)
    if not layers.products:
        sys.exit("this model has no quantized weights: --model demo-4bit")
    layers.keep_packed()
    return model


def _windows(tokenizer: Any, count: int) -> Iterator[list[int]]:
    from pydoc_data.topics import topics

    ids = tokenizer.encode("\n".join(topics[name] for name in sorted(topics)))
    step = len(ids) // count  # spread over the whole text
    for number in range(count):
        yield ids[number * step : number * step + WINDOW_TOKENS + 1]


def _read(model: Any, ids: list[int]) -> _Found:
    import mlx.core as mx

    logits = np.asarray(model(mx.array([ids[:-1]]))[0].astype(mx.float32)).astype(np.float64)
    highest = logits.max(axis=-1)
    total = np.log(np.exp(logits - highest[:, None]).sum(axis=-1)) + highest
    loss = total - logits[np.arange(len(ids) - 1), ids[1:]]
    return _Found(float(loss.mean()), logits.argmax(axis=-1))


def _perplexity(found: list[_Found]) -> float:
    return math.exp(sum(each.loss for each in found) / len(found))
