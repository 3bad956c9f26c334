"""Slabs that grow and shrink, with keys and values in one array or in two."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.utils import load_model

from engine.cache.layout import AttentionLayout, KVNode, Layout, probe_layout
from engine.cache.quantization import Precision, quantize
from engine.cache.slabs import Slab, StoredKV
from tests.tiny_models import Kind

LENGTH = 9


@pytest.mark.parametrize("value_dim", [32, 16])
def test_keys_and_values_go_with_their_row(value_dim: int) -> None:
    """When slabs grow and shrink, rows move, and a row is cleared. Alike, they share an array."""
    layer = AttentionLayout(2, 32, value_dim, mx.float32, None)
    layout = Layout((layer,), (), (KVNode(0),)).with_precision(Precision(8), dequantized=True)
    slab, other = Slab(layout, 2, 16), Slab(layout, 3, 64)
    assert len(slab.arrays) == (1 if value_dim == 32 else 2)
    kept = {}
    for row in (0, 1):
        for number, kind in enumerate(layout.arrays):
            assert kind.quantization is not None
            values = mx.random.normal((2, LENGTH, kind.dim))
            scales = quantize(values, kind.quantization).scales
            kept[row, number] = StoredKV(values, scales)
            slab.put(number, row, 0, kept[row, number])

    def holds(slab: Slab, row: int, number: int, expected: StoredKV) -> bool:
        found = slab.get(number, row, 0, LENGTH)
        assert found.scales is not None and expected.scales is not None
        assert mx.array_equal(slab.part(number)[row, :, :LENGTH], found.array)
        same_scales = mx.array_equal(found.scales, expected.scales)
        return bool(mx.array_equal(found.array, expected.array)) and bool(same_scales)

    for rows in (5, 2):
        slab.resize(rows)
        assert all(holds(slab, *place, its) for place, its in kept.items())
    for row in (0, 1):
        other.copy_row(2 - row, slab, row, LENGTH)
    assert all(holds(other, 2 - row, number, its) for (row, number), its in kept.items())
    for in_place in (False, True):
        row = int(in_place)
        mx.eval(slab.contents)
        slab.in_place = in_place
        slab.clear_row(row)
        for number in (0, 1):
            assert not mx.any(slab.part(number)[row]) and not holds(
                slab, row, number, kept[row, number]
            )
        if not in_place:
            assert all(holds(slab, 1, number, kept[1, number]) for number in (0, 1))


@pytest.mark.parametrize("rows", [9, 3])
@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt_oss"])
def test_resizing_a_slab_takes_no_more_than_one_array(
    tiny_model: Callable[..., Path], kind: Kind, rows: int
) -> None:
    layout = probe_layout(load_model(tiny_model(kind))[0])
    capacity = (64 << 20) // (6 * layout.slot_token_bytes)
    slab = Slab(layout, 6, capacity)
    mx.eval(slab.contents)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    slab.resize(rows)
    row_bytes = capacity * layout.slot_token_bytes
    change = (rows - 6) * row_bytes
    assert abs(mx.get_active_memory() - before - change) < row_bytes / 100
    allowed = max(0, change) + max(rows, 6) * capacity * layout.array_bytes
    assert mx.get_peak_memory() - before < 1.01 * allowed
