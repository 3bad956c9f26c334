"""The logits of mlx-lm's own caches for a sequence, and the distance of other logits from them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as stock

from engine.cache.quantization import UNQUANTIZED, Precision, fake_quantize

KV_CACHES = (stock.KVCache, stock.ChunkedKVCache, stock.RotatingKVCache)


@dataclass(frozen=True)
class Reference:
    """A random sequence, and mlx-lm's logits for it."""

    prompt: tuple[int, ...]  # at least one token
    continuation: tuple[int, ...]  # the tokens that follow the prompt
    expected: tuple[mx.array, ...]
    """Logits (steps, vocab) after the prompt's last token and after each of the continuation,
    for each way in which mlx-lm computes them. In most models those differ by rounding only."""
    adapter: int = 0  # the place of the adapter that it is computed with; 0: none

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.prompt + self.continuation

    def token(self, step: int) -> int:
        """Return the input token of decode ``step``."""
        return self.continuation[step - 1] if step else self.prompt[-1]

    def position(self, step: int) -> int:
        return len(self.prompt) - 1 + step

    @property
    def steps(self) -> int:
        return len(self.continuation) + 1

    def difference(self, step: int, logits: mx.array) -> float:
        """Return the `logits_distance` from the nearest of the expected logits."""
        return min(logits_distance(logits, way[step]) for way in self.expected)

    def largest_step(self, dtype: mx.Dtype) -> float:
        """Return the spacing of ``dtype`` at the largest of the expected logits, in
        their spread."""
        logits = self.expected[0].astype(mx.float32)
        logits = mx.where(mx.isfinite(logits), logits, 0)
        spread = mx.maximum(mx.std(logits, axis=-1), 1e-6)
        steps = mx.max(mx.abs(logits), axis=-1) / spread * mx.finfo(dtype).eps
        return float(mx.max(steps).item())


def logits_distance(ours: mx.array, theirs: mx.array) -> float:
    """Return the largest difference of two rows of logits, in standard deviations of ``theirs``.

    It is infinite unless both are infinite at the same tokens: some models forbid tokens that way.
    """
    ours, theirs = ours.astype(mx.float32), theirs.astype(mx.float32)
    finite = mx.isfinite(theirs)
    if not mx.all(mx.isfinite(ours) == finite).item():
        return float("inf")
    ours, theirs = mx.where(finite, ours, 0), mx.where(finite, theirs, 0)
    spread = mx.maximum(mx.std(theirs), 1e-6)
    return float((mx.max(mx.abs(ours - theirs)) / spread).item())


def make_reference(
    model: Any,
    length: int,
    steps: int,
    vocab_size: int,
    seed: int,
    num_ways: int = 2,
    precision: Precision = UNQUANTIZED,
) -> Reference:
    """Return a random sequence with a prompt of ``length`` tokens and ``steps`` decodes.

    ``num_ways`` is how many ways of computing the prompt are expected: 1: in one pass, 2: also
    token by token, 0: none.
    """
    rng = random.Random(seed)
    tokens = tuple(rng.randrange(vocab_size) for _ in range(length + steps - 1))
    expected = [
        compute_logits(model, make_rounding_cache(model, precision), tokens, length, at_once)
        for at_once in (length, 1)[:num_ways]
    ]
    return Reference(tokens[:length], tokens[length:], tuple(expected))


def rounding_noise(model: Any, references: Sequence[Reference], precision: Precision) -> float:
    """Return the largest `logits_distance` of mlx-lm's two ways of computing ``references``.

    One is expected, in one pass; the other computes the prompt token by token."""
    found = [0.0]
    for one in references:
        cache = make_rounding_cache(model, precision)
        rows = compute_logits(model, cache, one.tokens, len(one.prompt), 1)
        found += [one.difference(step, logits) for step, logits in enumerate(rows)]
    return max(found)


def make_rounding_cache(model: Any, precision: Precision) -> list[Any]:
    """Return mlx-lm's caches for ``model``, which round before attention, like slots."""
    caches: list[Any] = stock.make_prompt_cache(model)
    for cache in caches:
        for part in cache.caches if isinstance(cache, stock.CacheList) else (cache,):
            if isinstance(part, KV_CACHES):
                part.update_and_fetch = partial(_update, part.update_and_fetch, precision)
    return caches


def _update(update: Any, precision: Precision, *parts: mx.array) -> Any:
    schemes = [precision.for_dim(part.shape[-1]) for part in parts]
    pairs = zip(parts, schemes, strict=True)
    return update(*(part if how is None else fake_quantize(part, how) for part, how in pairs))


def compute_logits(
    model: Any, cache: list[Any], tokens: tuple[int, ...], length: int, at_once: int
) -> mx.array:
    """Return the logits (steps, vocab) after the last token of the prompt and each following token.

    The prompt is the first ``length`` of ``tokens``; it is put into ``cache`` in pieces of
    ``at_once`` tokens.
    """
    for start in range(0, length - 1, at_once):
        piece = tokens[start : min(start + at_once, length - 1)]
        model(mx.array([piece]), cache=cache)
        mx.eval([entry.state for entry in cache])
    rows = []
    for token in tokens[length - 1 :]:
        rows.append(model(mx.array([[token]]), cache=cache)[0, -1])
        mx.eval(rows)
    return mx.stack(rows)
