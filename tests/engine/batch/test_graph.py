"""Batches of MLX's graph, as on a GPU, against attention of each row alone."""

import random
from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from engine.batch import gpu, places
from engine.batch.gpu import AttentionCost, GPUBatch
from engine.batch.graph import GraphBatch
from engine.batch.groups import row_groups
from engine.batch.ragged import Row
from engine.cache.layout import AttentionLayout, KVNode, Layout
from engine.cache.quantization import Precision, fake_quantize, quantize
from engine.cache.slabs import Slab, Slabs, StoredKV
from engine.plan import Slot

CAPACITIES = (32, 96)
ROWS = 5
LAYER = AttentionLayout(2, 16, 16, mx.float32, None)
LAYOUT = Layout((LAYER,), (), (KVNode(0),))


def in_8_bits(layer: AttentionLayout) -> Layout:
    return Layout((layer,), (), (KVNode(0),)).with_precision(Precision(8), dequantized=True)


def filled(layout: Layout) -> Slabs:
    """Return two slabs of random content."""
    slabs = Slabs()
    for number, capacity in enumerate(CAPACITIES):
        slabs[number] = Slab(layout, ROWS, capacity)
        for i, array in enumerate(slabs[number].arrays):
            slabs[number].arrays[i] = mx.random.normal(array.shape)
    mx.eval([slab.contents for slab in slabs.values()])
    return slabs


def made_up(choose: random.Random, widest: int) -> list[Row]:
    """Return rows of both slabs, with gaps between them, some of them full."""
    rows = []
    for number, capacity in enumerate(CAPACITIES):
        for row in sorted(choose.sample(range(ROWS), choose.randint(number, ROWS))):
            width = choose.randint(1, widest)
            start = choose.choice([7, capacity - width, choose.randint(0, capacity - width)])
            rows.append(Row(Slot(number, row), start, start + width))
    return rows


def attention(query: mx.array, keys: mx.array, values: mx.array, row: Row, window: int) -> mx.array:
    """Return the attention of one row's queries (heads, width, dim) by the definition."""
    positions, queries = mx.arange(row.end)[None], mx.arange(row.start, row.end)[:, None]
    mask = (positions <= queries) & (positions > queries - window)
    repeats = query.shape[0] // keys.shape[0]
    keys, values = (mx.repeat(x[:, : row.end], repeats, axis=0) for x in (keys, values))
    scores = mx.where(mask, query @ keys.swapaxes(1, 2) * 0.3, -mx.inf)
    return mx.softmax(scores, axis=-1) @ values


@pytest.mark.parametrize("batch_class", [GraphBatch, GPUBatch])
@pytest.mark.parametrize("widest", [1, 6])
@pytest.mark.parametrize("window", [None, 9])
def test_every_row_attends_to_its_own_positions_and_is_stored_where_it_belongs(
    batch_class: type[GraphBatch], widest: int, window: int | None
) -> None:
    choose = random.Random(widest)
    for seed in range(12):
        mx.random.seed(seed)
        rows, slabs = made_up(choose, widest), filled(LAYOUT)
        before = {number: [np.array(a) for a in slab.arrays] for number, slab in slabs.items()}
        width = max(row.width for row in rows)
        keys, values = mx.random.normal((2, len(rows), 2, width, 16))
        query = mx.random.normal((len(rows), 4, width, 16))
        batch = batch_class(LAYOUT, slabs, rows)
        batch.write(0, keys, values)
        found = batch.attend(0, query, 0.3, window, None)
        for i, row in enumerate(rows):
            stored = [array[row.slot.row] for array in slabs[row.slot.slab_id].arrays]
            for new, kept in zip((keys, values), stored, strict=True):
                assert mx.array_equal(kept[:, row.start : row.end], new[i, :, : row.width])
            wanted = attention(query[i, :, : row.width], stored[0], stored[1], row, window or 99)
            assert mx.allclose(found[i, :, : row.width], wanted, atol=1e-5), (seed, rows, i)
        for number, arrays in before.items():
            ends = {row.slot.row: row for row in rows if row.slot.slab_id == number}
            for slot in range(ROWS):
                until = ends[slot].start if slot in ends else CAPACITIES[number]
                for old, new in zip(arrays, slabs[number].arrays, strict=True):
                    assert np.array_equal(old[slot, :, :until], new[slot, :, :until]), (seed, rows)


@pytest.mark.parametrize("widest", [1, 6])
@pytest.mark.parametrize("alike", [False, True])
def test_rows_attend_within_a_window_to_slots_that_keep_no_more(widest: int, alike: bool) -> None:
    """Passes follow each other until rings have come full circle several times."""
    window, capacity = 9, 96
    layers = (replace(LAYER, window=window), LAYER)
    layout = Layout(layers, (), (KVNode(0), KVNode(1))).with_rings(6, 5)
    slabs = Slabs()
    slabs[0] = Slab(layout, ROWS, capacity)
    assert [array.shape[2] for array in slabs[0].arrays] == [15, 15, capacity, capacity]
    choose = random.Random(widest)
    starts = {number: 0 if alike else 3 * number for number in (0, 1, 3)}
    kept = {number: mx.zeros((2, 2, 0, 16)) for number in starts}
    while min(starts.values()) < capacity:
        rows = []
        for number, start in starts.items():
            most = min(widest, capacity - start)
            if most > 0 and (alike or choose.random() < 0.8):
                width = most if alike else choose.randint(1, most)
                rows.append(Row(Slot(0, number), start, start + width))
        if not rows:
            continue
        width = max(row.width for row in rows)
        new = mx.random.normal((2, len(rows), 2, width, 16))
        query = mx.random.normal((len(rows), 4, width, 16))
        batch = GPUBatch(layout, slabs, rows)
        batch.write(0, *new)
        found = batch.attend(0, query, 0.3, None if alike else window, None)
        for i, row in enumerate(rows):
            number = row.slot.row
            its = new[:, i, :, : row.width]
            missing = mx.zeros((2, 2, row.start - kept[number].shape[2], 16))
            kept[number] = mx.concatenate([kept[number], missing, its], axis=2)
            keys, values = kept[number]
            wanted = attention(query[i, :, : row.width], keys, values, row, window)
            assert mx.allclose(found[i, :, : row.width], wanted, atol=1e-5), (rows, i)
            starts[number] = row.end


def test_positions_of_a_ring_are_copied_where_they_belong() -> None:
    """Blocks are copied from and to rings, and a row moves between slabs."""
    layout = Layout((replace(LAYER, window=9),), (), (KVNode(0),)).with_rings(6, 5)
    slabs = Slabs()
    for number, capacity in enumerate((10, 40, 80)):
        slabs[number] = Slab(layout, 2, capacity)
    new = mx.random.normal((2, 37, 16))
    kept = StoredKV(new, None)
    slabs[1].put(1, 0, 0, kept)  # more than a ring has
    for start, end in ((22, 37), (22, 25), (29, 31), (30, 37)):
        assert mx.array_equal(slabs[1].get(1, 0, start, end).array, new[:, start:end])
    slabs[2].copy_row(1, slabs[1], 0, 37)
    assert mx.array_equal(slabs[2].get(1, 1, 22, 37).array, new[:, 22:37])
    slabs[0].put(1, 0, 0, StoredKV(new[:, :10], None))
    slabs[1].copy_row(1, slabs[0], 0, 10)
    assert mx.array_equal(slabs[1].get(1, 1, 0, 10).array, new[:, :10])
    slabs[1].put(1, 1, 10, StoredKV(new[:, 10:], None))
    assert mx.array_equal(slabs[1].get(1, 1, 22, 37).array, new[:, 22:37])


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("widest", [1, 3])
@pytest.mark.parametrize("value_dim", [32, 16])
def test_what_is_stored_is_rounded(
    monkeypatch: pytest.MonkeyPatch, compiles: bool, widest: int, value_dim: int
) -> None:
    """Keys and values are rounded together if they have one shape, in slabs by themselves."""
    monkeypatch.setattr(GraphBatch, "compiles", compiles)
    layout = in_8_bits(AttentionLayout(2, 32, value_dim, mx.float32, None))
    rows = [
        Row(Slot(0, 0), 3, 3 + widest),
        Row(Slot(0, 2), 9, 10),
        Row(Slot(0, 3), 31, 32),
        Row(Slot(1, 1), 40, 40 + widest),
    ]
    slabs = filled(layout)
    keys = mx.random.normal((4, 2, widest, 32))
    values = mx.random.normal((4, 2, widest, value_dim))
    batch = GraphBatch(layout, slabs, rows)
    batch.write(0, keys, values)
    batch.finish_writes()
    for number, new in enumerate((keys, values)):
        scheme = layout.arrays[number].quantization
        assert scheme is not None
        rounded = fake_quantize(new, scheme)
        for i, row in enumerate(rows):
            slab = slabs[row.slot.slab_id]
            kept = slab.part(number)[row.slot.row, :, row.start : row.end]
            assert mx.array_equal(kept, rounded[i, :, : row.width])
            scales = slab.scales_of(number)
            assert scales is not None
            expected = quantize(new[i, :, : row.width], scheme).scales
            assert mx.array_equal(scales[:, row.slot.row, :, row.start : row.end], expected)


def test_scales_are_written_with_no_more_axes_than_cuda_takes() -> None:
    """It takes ten for the target and the indices together."""
    target = filled(in_8_bits(AttentionLayout(2, 32, 32, mx.float32, None)))[0].scales[0]
    for index in places._arrays_and_both((0, 1)):
        assert max(index.ndim, 3) + target.ndim <= 10


@pytest.mark.parametrize("width", [1, 4])
def test_compiled_writes_copy_no_array_of_a_slab(width: int) -> None:
    layout = in_8_bits(AttentionLayout(8, 64, 64, mx.bfloat16, None))
    slabs = Slabs()
    slabs[0] = Slab(layout, 8, 1024)
    new = mx.random.normal((8, 8, width, 64)).astype(mx.bfloat16)
    peaks = []
    for start in (3, 20):  # the first time compiles
        mx.eval(new)
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        rows = [Row(Slot(0, i), start + i, start + i + width) for i in range(8)]
        batch = GPUBatch(layout, slabs, rows)
        batch.write(0, new, new)
        batch.finish_writes()
        mx.eval(slabs[0].contents)
        peaks.append(mx.get_peak_memory() - before)
    assert peaks[1] < slabs[0].arrays[0].nbytes / 4


def calls(monkeypatch: pytest.MonkeyPatch, rows: Sequence[Row], window: int | None) -> list[int]:
    """Return the number of positions in each attention call of ``rows``."""
    lengths: list[int] = []
    stock = mx.fast.scaled_dot_product_attention

    def counted(query: mx.array, keys: mx.array, *args: object, **named: object) -> mx.array:
        lengths.append(keys.shape[2])
        return stock(query, keys, *args, **named)

    batch = GPUBatch(LAYOUT, filled(LAYOUT), rows)
    width = max(row.width for row in rows)
    with monkeypatch.context() as patch:
        patch.setattr(mx.fast, "scaled_dot_product_attention", counted)
        batch.attend(0, mx.zeros((len(rows), 4, width, 16)), 1.0, window, None)
    return lengths


def test_rows_of_a_slab_attend_in_one_call_and_within_a_window_to_that_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = [Row(Slot(1, i), 80 - i, 81 - i) for i in range(4)]
    assert calls(monkeypatch, rows, None) == [81]
    assert calls(monkeypatch, rows, 9) == [9 + 3]
    chunks = [Row(Slot(1, i), 40, 48) for i in range(4)]
    assert calls(monkeypatch, chunks, None) == [48]
    assert calls(monkeypatch, chunks, 9) == [9 + 7]
    monkeypatch.setattr(GPUBatch, "call_cost_tokens", 3)
    assert calls(monkeypatch, rows[:2], None) == [81]
    assert calls(monkeypatch, [rows[0], Row(Slot(1, 4), 10, 11)], None) == [81, 11]


def test_padding_beyond_every_window_sees_something() -> None:
    """What it attends to is stored beyond the end of its row, where others read it under their
    masks. A kernel may return NaN for a query that sees nothing."""
    rows = [Row(Slot(1, 0), 20, 22), Row(Slot(1, 1), 0, 14)]
    (group,) = row_groups(filled(LAYOUT)[1], 0, rows, 14, 1e6)
    mask = group.reach(9).mask
    assert isinstance(mask, mx.array) and mask.shape == (2, 1, 14, 22)
    assert mx.all(mx.any(mask, axis=-1))


def test_rows_keep_their_groups_while_all_of_them_grow() -> None:
    slab = filled(LAYOUT)[1]
    starts = [10, 12, 70, 71]
    for step in range(20):
        rows = [Row(Slot(1, i), start + step, start + step + 1) for i, start in enumerate(starts)]
        found = row_groups(slab, 3, rows, 1, 100.0)
        assert [list(group.members) for group in found] == [[3, 4], [5, 6]]


def test_the_cost_of_a_call_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(keys: mx.array, values: mx.array, length: int, width: int) -> float:
        return 1e-6 * (5000 + gpu.ROWS * length * (1 + 0.25 * (width - 1)))

    timed = gpu._seconds
    monkeypatch.setattr(gpu, "_seconds", seconds)
    assert gpu.measured_cost(LAYER) == pytest.approx(AttentionCost(5000, 0.25))
    monkeypatch.setattr(gpu, "_seconds", lambda *_: 1e-3)  # a timer that shows no difference
    assert gpu.measured_cost(LAYER) == (gpu.CALL_COST_LIMITS[1], gpu.QUERY_COST_LIMITS[0])
    monkeypatch.setattr(gpu, "_seconds", timed)
    monkeypatch.setattr(gpu, "LENGTHS", (4, 64))
    cost, per_query = gpu.measured_cost(LAYER)
    assert gpu.CALL_COST_LIMITS[0] <= cost <= gpu.CALL_COST_LIMITS[1]
    assert gpu.QUERY_COST_LIMITS[0] <= per_query <= gpu.QUERY_COST_LIMITS[1]


def test_costs_measured_for_one_model_are_not_those_of_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A draft model is measured after its target."""
    costs = iter([AttentionCost(2_000.0, 0.1), AttentionCost(16_000.0, 0.2)])
    monkeypatch.setattr(gpu, "measured_cost", lambda layer: next(costs))
    target, draft = GPUBatch.measured(LAYER), GPUBatch.measured(LAYER)
    assert (target.call_cost_tokens, draft.call_cost_tokens) == (2_000, 16_000)
    assert (target.query_cost, draft.query_cost) == (0.1, 0.2)
    assert target.__name__ == GPUBatch.__name__, "stored proofs name it"


def test_passes_are_as_long_as_they_like_if_no_layer_has_a_window() -> None:
    assert LAYOUT.with_rings(6, 5) == LAYOUT
    assert replace(LAYOUT, layers=(replace(LAYER, window=9),)).with_rings(6, 5).longest_pass == 6
