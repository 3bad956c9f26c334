"""The filters against mlx-lm's, on the same logits, in both array libraries."""

import math
import random
from typing import Any

import mlx.core as mx
import numpy
import pytest
from mlx_lm import sample_utils

from engine.sampling.filters import Filter, filter_mask

LIBRARIES = pytest.mark.parametrize("xp", [numpy, mx], ids=["numpy", "mlx"])
EXEMPT_IDS = (2, 7, 11)


def stays(xp: Any, logits: mx.array, filters: list[Filter]) -> numpy.ndarray:
    if xp is mx:
        return numpy.array(filter_mask(mx, logits, filters))
    rows = [filter_mask(numpy, numpy.array(logits[i])[None], [f]) for i, f in enumerate(filters)]
    return numpy.concatenate(rows)


def mlx_lm_mask(logits: mx.array, f: Filter) -> numpy.ndarray:
    """Return whether mlx-lm's sampler keeps each token of one row (vocab,)."""
    logprobs = (logits - mx.logsumexp(logits))[None]
    if 0 < f.top_p < 1:
        logprobs = sample_utils.apply_top_p(logprobs, f.top_p)
    if f.min_p:
        logprobs = sample_utils.apply_min_p(logprobs, f.min_p)
    if f.xtc_threshold is not None:
        logprobs = sample_utils.apply_xtc(logprobs, 1.0, f.xtc_threshold, list(f.exempt_ids))
    if f.top_k:
        logprobs = sample_utils.apply_top_k(logprobs, f.top_k)
    return numpy.array(logprobs[0] > -math.inf)


def logits_of(seed: int, vocab: int, spread: float) -> mx.array:
    return mx.random.normal((vocab,), key=mx.random.key(seed)) * spread


@LIBRARIES
def test_filters_alone_and_together_keep_what_mlx_lm_keeps_row_by_row(xp: Any) -> None:
    choose = random.Random(5)
    filters = [
        Filter(
            top_p=choose.choice([1.0, 1.0, 0.999, 0.9, 0.6, 0.3]),
            min_p=choose.choice([0.0, 0.0, 0.001, 0.02, 0.1, 1.0]),
            xtc_threshold=choose.choice([None, None, 0.0, 0.01, 0.05, 0.2, 0.5]),
            exempt_ids=choose.choice([(), EXEMPT_IDS, tuple(range(12))]),
            top_k=choose.choice([0, 0, 1, 2, 5, 40]),
        )
        for _ in range(300)
    ]
    logits = mx.stack([logits_of(i, 120, 1 + i % 4) for i in range(len(filters))])
    expected = numpy.stack([mlx_lm_mask(logits[i], f) for i, f in enumerate(filters)])
    wrong = numpy.nonzero((stays(xp, logits, filters) != expected).any(axis=1))[0]
    assert not len(wrong), [filters[i] for i in wrong]
    assert 0 < expected.sum() < expected.size


@LIBRARIES
def test_top_p_of_a_flat_distribution_reaches_far_down(xp: Any) -> None:
    """It keeps more tokens than any bound on their number would allow."""
    logits = logits_of(1, 20_000, 0.1)
    f = Filter(top_p=0.95)
    (ours,) = stays(xp, logits[None], [f])
    assert 18_000 < ours.sum() < 20_000
    assert abs(int(ours.sum()) - int(mlx_lm_mask(logits, f).sum())) <= 2  # rounding at the edge


@LIBRARIES
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_raise_no_error(xp: Any, value: float) -> None:
    logits = mx.full((1, 50), value)
    for f in (Filter(top_p=0.5), Filter(min_p=0.5, top_k=3), Filter(xtc_threshold=0.1, top_k=3)):
        assert stays(xp, logits, [f]).shape == (1, 50)
