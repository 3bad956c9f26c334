"""Batches of MLX's graph, as on a GPU, against attention of each row alone."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import pytest

from engine.batch import gpu, graph
from engine.batch.dense import DenseBatch
from engine.batch.given import Given
from engine.batch.gpu import AttentionCost, GPUBatch
from engine.batch.graph import GraphBatch, Reach
from engine.batch.ragged import Row
from engine.cache.graph_pages import GraphPages
from engine.cache.layout import AttentionLayout, KVNode, Layout
from engine.cache.quantization import Precision, fake_quantize
from engine.cache.slots import Slots
from tests.engine.batch.graph_slots import graph_slots
from tests.engine.conftest import Wrap

CAPACITY, ROWS = 96, 7
LAYER = AttentionLayout(2, 32, 32, mx.float32, None)
LAYOUT = Layout((LAYER,), (), (KVNode(0),))
KINDS = {
    "values": LAYER,
    "bfloat16": AttentionLayout(2, 32, 32, mx.bfloat16, None),
    "odd": AttentionLayout(2, 7, 5, mx.bfloat16, None),
    "uneven": AttentionLayout(1, 80, 64, mx.float32, None),
    "partly": AttentionLayout(2, 32, 12, mx.float32, None),
}


def layout_of(kind: str, bits: int) -> Layout:
    return Layout((KINDS[kind],), (), (KVNode(0),)).with_precision(Precision(bits))


def made_up(choose: random.Random, widest: int) -> list[Row]:
    """Return rows of some slots, some of them full."""
    rows = []
    for slot in sorted(choose.sample(range(ROWS), choose.randint(1, ROWS))):
        width = choose.randint(1, widest)
        start = choose.choice([7, CAPACITY - width, choose.randint(0, CAPACITY - width)])
        rows.append(Row(slot, start, start + width))
    return rows


def kept(layout: Layout, new: mx.array, half: int) -> mx.array:
    """Return ``new`` keys or values as pages keep them."""
    how = layout.arrays[half].quantization
    return new if how is None else fake_quantize(new, how)


def begun(slots: Slots, rows: Sequence[Row]) -> list[list[mx.array]]:
    """Write random keys and values before each row, and return them as they are kept."""
    layout = slots.pages.layout
    (layer,) = layout.layers
    both = []
    for row in rows:
        new = [
            mx.random.normal((1, layer.kv_heads, row.start, dim)).astype(layer.dtype)
            for dim in (layer.key_dim, layer.value_dim)
        ]
        if row.start:
            GraphBatch(layout, slots, [Row(row.slot, 0, row.start)]).write(0, new[0], new[1])
        both.append([kept(layout, array[0], half) for half, array in enumerate(new)])
    return both


def attention(
    query: mx.array, keys: mx.array, values: mx.array, row: Row, window: int, sinks: mx.array | None
) -> mx.array:
    """Return the attention of one row's queries (heads, width, dim) by the definition."""
    positions, queries = mx.arange(row.end)[None], mx.arange(row.start, row.end)[:, None]
    mask = (positions <= queries) & (positions > queries - window)
    repeats = query.shape[0] // keys.shape[0]
    keys, values = (mx.repeat(x.astype(mx.float32), repeats, axis=0) for x in (keys, values))
    scores = query.astype(mx.float32) @ keys.swapaxes(1, 2) * 0.3
    scores = mx.where(mask, scores, -mx.inf)
    if sinks is not None:
        column = mx.broadcast_to(sinks[:, None, None], (*scores.shape[:2], 1))
        scores = mx.concatenate([scores, column], axis=-1)
    return mx.softmax(scores, axis=-1)[..., : row.end] @ values


@pytest.mark.parametrize("batch_class", [GraphBatch, GPUBatch])
@pytest.mark.parametrize("widest", [1, 6])
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize(("kind", "bits"), [("values", 16), ("bfloat16", 8), ("values", 4)])
def test_every_row_attends_to_its_own_positions(
    batch_class: type[GraphBatch], widest: int, window: int | None, kind: str, bits: int
) -> None:
    choose, layout = random.Random(widest), layout_of(kind, bits)
    tolerance = 1e-5 if layout.layers[0].dtype == mx.float32 else 3e-2
    for seed in range(12):
        mx.random.seed(seed)
        rows, slots = made_up(choose, widest), graph_slots(layout, ROWS, CAPACITY)
        before = begun(slots, rows)
        width = max(row.width for row in rows)
        dtype = layout.layers[0].dtype
        keys, values = mx.random.normal((2, len(rows), 2, width, 32)).astype(dtype)
        query = mx.random.normal((len(rows), 4, width, 32)).astype(dtype)
        sinks = mx.random.normal((4,)).astype(dtype) if seed % 2 else None
        batch = batch_class(layout, slots, rows)
        batch.write(0, keys, values)
        found = batch.attend(0, query, 0.3, window, sinks)
        assert not mx.any(mx.isnan(found))
        for i, row in enumerate(rows):
            both = [
                mx.concatenate([old, kept(layout, new[i, :, : row.width], half)], axis=1)
                for half, (old, new) in enumerate(zip(before[i], (keys, values), strict=True))
            ]
            for number, whole in enumerate(both):
                stored = slots.pages.read(number, slots.tables[row.slot], row.end).array
                assert mx.array_equal(stored[0], whole), (seed, rows, i)
            wanted = attention(
                query[i, :, : row.width], both[0], both[1], row, window or 999, sinks
            )
            assert mx.allclose(found[i, :, : row.width], wanted, atol=tolerance), (seed, rows, i)


@pytest.mark.parametrize("most", [0, 2, 3])
def test_a_call_gathers_one_row_or_as_many_as_there_is_memory_for(
    most: int, monkeypatch: pytest.MonkeyPatch, wrap: Wrap
) -> None:
    slots = graph_slots(LAYOUT, ROWS, CAPACITY)
    rows = [Row(slot, end - 1, end) for slot, end in enumerate((30, 60, 60, 40, 59, 58, 7))]
    begun(slots, rows)
    batch = GraphBatch(LAYOUT, slots, rows)
    batch.write(0, *mx.random.normal((2, ROWS, 2, 1, 32)))
    query = mx.random.normal((ROWS, 4, 1, 32))
    wanted = batch.attend(0, query, 0.3, None, None)
    size = 60 * LAYOUT.layer_value_bytes
    monkeypatch.setattr(graph, "MAX_GATHERED_BYTES", most * size)
    gathered: list[int] = []

    @wrap(GraphBatch, "_gathered")
    def noted(gather: Callable[..., Any], *of: Any) -> Any:
        found = gather(*of)
        gathered.append(len(found[0]))
        assert sum(each.nbytes for each in found) <= max(1, most) * size
        return found

    found = GraphBatch(LAYOUT, slots, rows).attend(0, query, 0.3, None, None)
    assert mx.allclose(found, wanted, atol=1e-5)
    assert sum(gathered) == ROWS and max(gathered) == max(1, most)


@pytest.mark.parametrize("kind", [*KINDS])
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_dense_batches_fetch_all_positions_with_zeros_behind_each_row(kind: str, bits: int) -> None:
    layout = layout_of(kind, bits)
    slots, rows = graph_slots(layout, ROWS, CAPACITY), [Row(1, 40, 41), Row(4, 3, 4)]
    before, (layer,) = begun(slots, rows), layout.layers
    batch = DenseBatch(layout, slots, rows)
    new = [
        mx.random.normal((2, layer.kv_heads, 1, dim)).astype(layer.dtype)
        for dim in (layer.key_dim, layer.value_dim)
    ]
    batch.write(0, new[0], new[1])
    for half in (0, 1):
        found = batch.fetch(half)
        assert found.shape == (2, layer.kv_heads, 41, new[half].shape[-1])
        for i, row in enumerate(rows):
            wanted = [before[i][half], kept(layout, new[half][i], half)]
            assert mx.array_equal(found[i, :, : row.end], mx.concatenate(wanted, axis=1))
            assert not mx.any(found[i, :, row.end :])


def test_tokens_of_a_picture_attend_to_all_of_it() -> None:
    slots, row = graph_slots(LAYOUT, ROWS, CAPACITY), Row(2, 20, 40)
    ((old_keys, old_values),) = begun(slots, [row])
    keys, values = mx.random.normal((2, 1, 2, 20, 32))
    query = mx.random.normal((1, 4, 20, 32))
    batch = GraphBatch(LAYOUT, slots, [row])
    batch.given = Given([], mx.zeros((0, 1)), spans=((25, 35),))
    batch.write(0, keys, values)
    found = batch.attend(0, query, 0.3, None, None)
    keys, values = (
        mx.concatenate([old, new[0]], axis=1)
        for old, new in ((old_keys, keys), (old_values, values))
    )
    for at in range(20):
        end = 35 if 5 <= at < 15 else 21 + at
        seen, asked = [each[:, :end] for each in (keys, values)], query[0, :, at : at + 1]
        wanted = attention(asked, seen[0], seen[1], Row(2, end - 1, end), 999, None)
        assert mx.allclose(found[0, :, at : at + 1], wanted, atol=1e-5), at


def calls(monkeypatch: pytest.MonkeyPatch, rows: Sequence[Row], window: int | None) -> list[int]:
    """Return the number of positions in each attention call of ``rows``."""
    lengths: list[int] = []
    stock = mx.fast.scaled_dot_product_attention

    def counted(query: mx.array, keys: mx.array, *args: object, **named: object) -> mx.array:
        lengths.append(keys.shape[2])
        return stock(query, keys, *args, **named)

    batch = GraphBatch(LAYOUT, graph_slots(LAYOUT, ROWS, CAPACITY), rows)
    with monkeypatch.context() as patch:
        patch.setattr(mx.fast, "scaled_dot_product_attention", counted)
        batch.attend(0, mx.zeros((len(rows), 4, batch.width, 32)), 1.0, window, None)
    return lengths


def test_rows_attend_in_one_call_and_within_a_window_to_its_pages_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = [Row(i, 80 - i, 81 - i) for i in range(4)]
    assert calls(monkeypatch, rows, None) == [81]
    assert calls(monkeypatch, rows, 9) == [81 - 64]
    assert calls(monkeypatch, [Row(0, 80, 81), Row(1, 10, 11)], 9) == [81 - 64]
    assert calls(monkeypatch, [Row(i, 80, 81) for i in range(4)], 9) == [9]
    chunks = [Row(i, 40, 48) for i in range(4)]
    assert calls(monkeypatch, chunks, None) == [48]
    assert calls(monkeypatch, chunks, 9) == [48 - 32]
    monkeypatch.setattr(GraphBatch, "call_cost_tokens", 3)
    assert calls(monkeypatch, [Row(0, 80, 81), Row(1, 79, 80)], None) == [81]
    assert calls(monkeypatch, [Row(0, 80, 81), Row(4, 10, 11)], None) == [11, 81]


def test_padding_beyond_every_window_sees_something() -> None:
    """A kernel may return NaN for a query that sees nothing."""
    rows = [Row(0, 20, 22), Row(1, 0, 14)]
    mask = Reach(rows, [[0, 1], [2]], 16, 14, window=9).mask
    assert isinstance(mask, mx.array) and mask.shape == (2, 1, 14, 22)
    assert mx.all(mx.any(mask, axis=-1))


@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("bits", [16, 8])
def test_a_pass_copies_no_array_of_pages(width: int, bits: int) -> None:
    layer = AttentionLayout(8, 64, 64, mx.bfloat16, None)
    layout = Layout((layer,), (), (KVNode(0),)).with_precision(Precision(bits))
    slots = graph_slots(layout, 8, 2048, page_tokens=64)
    new = mx.random.normal((8, 8, width, 64)).astype(mx.bfloat16)
    pages = slots.pages
    for start in (3, 70):
        mx.eval(new, pages.contents)
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        batch = GPUBatch(layout, slots, [Row(i, start + i, start + i + width) for i in range(8)])
        batch.write(0, new, new)
        found = batch.attend(0, new, 1.0, None, None)
        mx.eval(found, pages.contents)
        assert mx.get_peak_memory() - before < pages.nbytes * 0.75, "the array of pages was copied"


def test_the_cost_of_a_call_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(pages: GraphPages, length: int, width: int) -> float:
        return 1e-6 * (5000 + gpu.ROWS * length * (1 + 0.25 * (width - 1)))

    timed = gpu._seconds
    monkeypatch.setattr(gpu, "_seconds", seconds)
    assert gpu.measured_cost(LAYOUT, 0) == pytest.approx(AttentionCost(5000, 0.25))
    monkeypatch.setattr(gpu, "_seconds", lambda *_: 1e-3)  # a timer that shows no difference
    assert gpu.measured_cost(LAYOUT, 0) == (gpu.CALL_COST_LIMITS[1], gpu.QUERY_COST_LIMITS[0])
    monkeypatch.setattr(gpu, "_seconds", timed)
    monkeypatch.setattr(gpu, "LENGTHS", (4, 64))
    cost, per_query = gpu.measured_cost(LAYOUT, 0)
    assert gpu.CALL_COST_LIMITS[0] <= cost <= gpu.CALL_COST_LIMITS[1]
    assert gpu.QUERY_COST_LIMITS[0] <= per_query <= gpu.QUERY_COST_LIMITS[1]


def test_costs_measured_for_one_model_are_not_those_of_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A draft model is measured after its target."""
    costs = iter([AttentionCost(2_000.0, 0.1), AttentionCost(16_000.0, 0.2)])
    monkeypatch.setattr(gpu, "measured_cost", lambda layout, layer: next(costs))
    target, draft = GPUBatch.measured(LAYOUT), GPUBatch.measured(LAYOUT)
    assert (target.call_cost_tokens, draft.call_cost_tokens) == (2_000, 16_000)
    assert (target.query_cost, draft.query_cost) == (0.1, 0.2)
    assert target.__name__ == GPUBatch.__name__, "stored proofs name it"
