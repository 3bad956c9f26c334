"""Log-probabilities of sampled tokens and of the most likely ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy

from engine.backend import arrays
from shared.wire import PackedLogprobs, TokenLogprobs

_BLOCK = 64


class PendingLogprobs:
    """Log-probabilities that the device may still be computing."""

    def __init__(
        self, rows: Sequence[int], chosen: Any, ids: Any, values: Any, counts: Sequence[int]
    ) -> None:
        """``counts`` is the number of alternatives requested for each of ``rows``."""
        self.rows = rows
        """The numbers of the rows, in their batch."""
        self._chosen = chosen
        self._ids = ids
        self._values = values
        self._counts = counts

    @property
    def arrays(self) -> list[mx.array]:
        """The arrays to evaluate."""
        parts = (self._chosen, self._ids, self._values)
        return [part for part in parts if isinstance(part, mx.array)]

    def read(self) -> tuple[TokenLogprobs, ...]:
        """Wait for the device and return the log-probabilities of each row, in order."""
        columns = (part.tolist() for part in (self._chosen, self._ids, self._values))
        return tuple(
            TokenLogprobs(chosen=chosen, top_ids=tuple(ids[:count]), top=tuple(values[:count]))
            for chosen, ids, values, count in zip(*columns, self._counts, strict=True)
        )

    def pack(self) -> PackedLogprobs:
        """Like `read`, if all rows request the same number of alternatives."""
        return PackedLogprobs(
            chosen=numpy.array(self._chosen, "<f4").tobytes(),
            top_ids=numpy.array(self._ids, "<i4").tobytes(),
            top=numpy.array(self._values, "<f4").tobytes(),
        )


@numpy.errstate(invalid="ignore")  # a model's logits may be NaN
def gather_logprobs(
    logits: mx.array,
    chosen: Any,
    rows: Sequence[int],
    counts: Sequence[int] = (),
    *,
    ids: Sequence[int] = (),
) -> PendingLogprobs:
    """Return log-probabilities of ``chosen`` (rows,) and of each row's ``counts`` best tokens, or
    of the tokens ``ids`` if there are any. ``rows`` are their numbers in the batch.

    They are from the softmax of the model's own ``logits`` (rows, vocab)."""
    xp = arrays.array_namespace()
    x = arrays.asarray(xp, logits.astype(mx.float32))
    best = xp.max(x, axis=-1, keepdims=True)
    total = best + xp.log(xp.sum(xp.exp(x - best), axis=-1, keepdims=True))
    own = xp.take_along_axis(x, xp.array(chosen)[:, None], axis=-1)
    if ids:
        counts = [len(ids)] * len(rows)
        shown = xp.array([list(ids)] * len(rows))
    else:
        shown = _largest(xp, x, min(max(counts), x.shape[-1]))
    values = xp.take_along_axis(x, shown, axis=-1)
    return PendingLogprobs(rows, (own - total)[:, 0], shown, values - total, counts)


def target_logprobs(logits: mx.array, target_ids: Sequence[int], count: int) -> PendingLogprobs:
    """Score the tokens that follow the first positions of ``logits`` (positions, vocab)."""
    positions = len(target_ids)
    targets = mx.array(target_ids)
    return gather_logprobs(logits[:positions], targets, range(positions), [count] * positions)


def _largest(xp: Any, x: Any, count: int) -> Any:
    """Return indices (rows, count) of each row's largest values, in descending order.

    They are in the ``count`` blocks with the largest maxima, so only these are sorted."""
    rows, width = x.shape
    if count == 0:
        return xp.zeros((rows, 0), dtype=xp.int32)
    blocks = -(-width // _BLOCK)
    if width % _BLOCK:
        x = xp.pad(x, [(0, 0), (0, blocks * _BLOCK - width)], constant_values=-xp.inf)
    x = x.reshape(rows, blocks, _BLOCK)
    best = xp.argsort(-xp.max(x, axis=-1), axis=-1)[:, :count]
    near = xp.take_along_axis(x, best[:, :, None], axis=1).reshape(rows, -1)
    order = xp.argsort(-near, axis=-1)[:, :count]
    ids = (best[:, :, None] * _BLOCK + xp.arange(_BLOCK)).reshape(rows, -1)
    return xp.take_along_axis(ids, order, axis=-1)
