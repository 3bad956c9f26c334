"""Attention of rows of very different lengths in one call, against the formula."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from engine.backend.blas import cblas_sgemm_batch
from engine.batch.cpu.together import Together
from engine.batch.ragged import Row
from engine.cache.layout import AttentionLayout, Layout
from engine.cache.slabs import Slab
from engine.plan import Slot

GEMM = cblas_sgemm_batch()
pytestmark = pytest.mark.skipif(
    GEMM is None, reason="the BLAS that was loaded does not multiply many at once"
)

KV_HEADS, QUERIES, KEY_DIM, VALUE_DIM = 2, 3, 16, 24
LENGTHS = (700, 3, 690, 64, 1, 65)


@pytest.mark.parametrize("window", [None, 64, 1])
def test_each_row_attends_to_its_own_positions(window: int | None) -> None:
    layers = [AttentionLayout(KV_HEADS, KEY_DIM, VALUE_DIM, mx.float32, window)] * 2
    layout = Layout(layers=tuple(layers), states=(), tree=())
    slabs = [Slab(layout, 5, 704), Slab(layout, 3, 800)]
    noise = np.random.default_rng(1)
    for slab in slabs:
        for array in slab.arrays:
            np.asarray(array)[:] = noise.standard_normal(array.shape, np.float32)
    slots = [Slot(0, 0), Slot(0, 1), Slot(0, 4), Slot(1, 0), Slot(1, 1), Slot(1, 2)]
    rows = [Row(slot, end - 1, end) for slot, end in zip(slots, LENGTHS, strict=True)]
    assert GEMM is not None
    together = Together(GEMM, layout, [(slabs[0], 0, rows[:3]), (slabs[1], 3, rows[3:])])

    for layer in (1, 0):
        shape = (len(rows), 2 * KV_HEADS, QUERIES, 1, KEY_DIM)
        asked = noise.standard_normal(shape, np.float32)[:, :KV_HEADS]  # not contiguous
        out = np.full((*asked.shape[:-1], VALUE_DIM), np.nan, np.float32)
        together.attend_to(layer, asked, out, window)
        for row, queries, found in zip(rows, asked, out, strict=True):
            low = 0 if window is None else max(0, row.end - window)
            keys, values = (
                np.asarray(slabs[row.slot.slab_id].arrays[2 * layer + i])[
                    row.slot.row, :, low : row.end
                ]
                for i in (0, 1)
            )
            scores = np.exp(queries[:, :, 0].astype(np.float64) @ keys.swapaxes(1, 2))
            expected = scores / scores.sum(axis=-1, keepdims=True) @ values
            np.testing.assert_allclose(found[:, :, 0], expected, rtol=1e-4, atol=1e-5)
