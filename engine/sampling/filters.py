"""Filters of the tokens that may be drawn: top-p, min-p, XTC and top-k, as in mlx-lm.

mlx-lm's `make_sampler` applies them in this order and before the temperature. Each keeps a
contiguous range of the tokens ordered by likelihood, so together they amount to two logits
for each row, a floor and a ceiling.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy


class Filter(NamedTuple):
    """The filters of one row. The defaults let every token pass."""

    top_p: float = 1.0  # off outside (0, 1)
    min_p: float = 0.0  # off at 0
    xtc_threshold: float | None = None  # off if None
    exempt_ids: tuple[int, ...] = ()  # tokens that XTC never excludes
    top_k: int = 0  # off below 1

    @property
    def has_floor(self) -> bool:
        """Whether there is a floor that does not depend on the number of tokens above it."""
        return 0 < self.top_p < 1 or self.min_p > 0

    @property
    def keeps_all(self) -> bool:
        return not (self.has_floor or self.xtc_threshold is not None or self.top_k > 0)


@numpy.errstate(invalid="ignore")  # a model's logits may be NaN
def filter_mask(xp: Any, logits: Any, filters: Sequence[Filter]) -> Any:
    """Return whether each token of ``logits`` (rows, vocab), float32, stays.

    Arrays are those of the library ``xp``. NumPy's have one row."""
    best = xp.max(logits, axis=-1, keepdims=True)
    total = xp.sum(xp.exp(logits - best), axis=-1, keepdims=True)
    ranked = _ranked(xp, logits, filters, best, total)
    mass = xp.exp(ranked - best)
    floor = xp.maximum(
        _top_p_floor(xp, ranked, mass, total, [f.top_p for f in filters]),
        best + _column(xp, [math.log(f.min_p) if f.min_p > 0 else -math.inf for f in filters]),
    )
    excluding = [row for row, f in enumerate(filters) if f.xtc_threshold is not None]
    ceiling = _xtc_ceiling(xp, ranked, mass, total, floor, filters) if excluding else None
    if any(f.top_k > 0 for f in filters):
        top_k = _top_k_floor(xp, logits, ranked, floor, ceiling, filters)
        floor = xp.maximum(floor, top_k)
    stays = logits >= floor
    if ceiling is not None:
        stays = stays & (logits <= ceiling)
        for row in (row for row in excluding if filters[row].exempt_ids):
            exempt_ids = xp.array(filters[row].exempt_ids, dtype=xp.int32)
            stays[row, exempt_ids] = logits[row, exempt_ids] >= floor[row]
    return stays


def _top_p_floor(xp: Any, ranked: Any, mass: Any, total: Any, top_p: Sequence[float]) -> Any:
    """Return the logit of the last token of the smallest set that reaches each row's top-p."""
    on = _column(xp, [0 < p < 1 for p in top_p])
    above = xp.cumsum(mass, axis=-1) - mass
    needed = (above < _column(xp, top_p) * total) & (ranked > -math.inf)
    last = xp.maximum(needed.sum(axis=-1, keepdims=True), 1) - 1
    return xp.where(on, xp.take_along_axis(ranked, last, axis=-1), -math.inf)


def _xtc_ceiling(
    xp: Any, ranked: Any, mass: Any, total: Any, floor: Any, filters: Sequence[Filter]
) -> Any:
    """Return the smallest logit above each row's threshold, infinity if there is none."""
    thresholds = [math.inf if f.xtc_threshold is None else f.xtc_threshold for f in filters]
    mass = xp.where(ranked >= floor, mass, 0.0)
    left = xp.sum(mass, axis=-1, keepdims=True)
    total = xp.where(_column(xp, [f.has_floor for f in filters]), left, total)
    over = mass > _column(xp, thresholds) * total
    count = over.sum(axis=-1, keepdims=True)
    last = xp.take_along_axis(ranked, xp.maximum(count, 1) - 1, axis=-1)
    return xp.where(count > 0, last, math.inf)


def _top_k_floor(
    xp: Any, logits: Any, ranked: Any, floor: Any, ceiling: Any, filters: Sequence[Filter]
) -> Any:
    """Return the logit of the k-th most likely remaining token."""
    top_k = _column(xp, [f.top_k for f in filters])
    index = top_k - 1
    exempt = None
    if ceiling is not None:
        index = index + (ranked > ceiling).sum(axis=-1, keepdims=True)
        width = max(len(f.exempt_ids) for f in filters)
        if width:
            exempt, count = _exempt_above(xp, logits, floor, ceiling, filters, width)
            index = index - count
    last = ranked.shape[-1] - 1
    kth = xp.take_along_axis(ranked, xp.clip(index, 0, last), axis=-1)
    if exempt is not None:
        # Tokens that XTC never excludes may occupy all k places.
        among = xp.take_along_axis(exempt, xp.clip(top_k - 1, 0, width - 1), axis=-1)
        kth = xp.where(count >= top_k, among, kth)
    return xp.where(top_k > 0, kth, -math.inf)


def _exempt_above(
    xp: Any, logits: Any, floor: Any, ceiling: Any, filters: Sequence[Filter], width: int
) -> tuple[Any, Any]:
    """Return the logits of exempt tokens above the ceiling, largest first (rows, width), and
    their number (rows, 1)."""
    ids = xp.array([[*f.exempt_ids, *[0] * (width - len(f.exempt_ids))] for f in filters])
    real = xp.array([[i < len(f.exempt_ids) for i in range(width)] for f in filters])
    found = xp.take_along_axis(logits, ids, axis=-1)
    above = real & (found > ceiling) & (found >= floor)
    ordered = -xp.sort(-xp.where(above, found, -math.inf), axis=-1)
    return ordered, above.sum(axis=-1, keepdims=True)


def _column(xp: Any, values: Sequence[float]) -> Any:
    array = xp.array(values)[:, None]
    return array.astype(xp.float32) if isinstance(values[0], float) else array


def _ranked(xp: Any, logits: Any, filters: Sequence[Filter], best: Any, total: Any) -> Any:
    """Return each row's logits, largest first.

    NumPy's single row is reduced to the logits that may matter first: sorting all of them takes
    half a decode step."""
    if xp is mx:
        return -mx.sort(-logits, axis=-1)
    (row,), (f,) = logits, filters
    return numpy.sort(_candidates(row, f, float(best[0, 0]), float(total[0, 0])))[None, ::-1]


_SLACK = 1e-3
"""Margin of a threshold, in logits, for rounding errors."""
_LIKELY_PROBABILITY = 2e-5
"""Tokens above this probability are few, and mostly reach top-p."""


def _candidates(row: Any, f: Filter, best: float, total: float) -> Any:
    """Return the logits of ``row`` that determine the floor and the ceiling.

    ``total`` is the mass of the row, in units of the mass of the ``best`` logit."""
    count = len(row)
    if f.has_floor:
        cut = best + math.log(f.min_p) - _SLACK if f.min_p > 0 else -math.inf
        if 0 < f.top_p < 1:
            likely = row[row >= max(cut, best + math.log(_LIKELY_PROBABILITY * total))]
            if numpy.exp(likely - best).sum() > (f.top_p + _SLACK) * total:
                return likely
            # All tokens below this together have less mass than top-p omits.
            cut = max(cut, best + math.log((1 - f.top_p) * total / count) - _SLACK)
        likely = row[row >= cut]
        return likely if len(likely) else row[:1]  # empty only if logits are NaN
    needed = max(f.top_k, 1)
    if f.xtc_threshold is not None:
        threshold = f.xtc_threshold * total
        lowest = best + math.log(threshold) - _SLACK if threshold > 0 else -math.inf
        needed += int((row >= lowest).sum())
    return numpy.partition(row, count - needed)[count - needed :] if needed < count else row
