"""Pages on the host: what is written is read again with the same bits, wherever it lies."""

import sys
from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest

from engine.cache.layout import AttentionLayout, KVNode, Layout
from engine.cache.quantization import Precision, dequantize, quantize
from engine.cpu.attention import scratch
from engine.cpu.attention.scratch import ScratchRows
from engine.cpu.onnx import graphs
from engine.cpu.pages import host_memory, unpacked
from engine.cpu.pages.host_pages import HostPages, Scratch, TokenPlaces
from engine.cpu.pages.rounding import Array
from engine.cpu.pages.unpacked import FIRST_PASSES

pytestmark = pytest.mark.skipif(mx.default_device() == mx.gpu, reason="for CPUs")

PAGE, HEADS, LENGTH = 64, 2, 200
TABLE = (5, 0, 3, 6)
KINDS = {
    "keys and values alike": (64, 64),
    "other values": (128, 32),
    "80 wide": (80, 80),
    "no values": (64, 0),
    "of no width for codes": (36, 64),
}


@pytest.fixture(params=[16, 8, 4])
def precision(request: pytest.FixtureRequest) -> Precision:
    return Precision(request.param)


def made(
    precision: Precision, what: str = "keys and values alike", num_pages: int = 8
) -> HostPages:
    layer = AttentionLayout(HEADS, *KINDS[what], mx.float32, None)
    layout = Layout((layer, layer), (), (KVNode(0), KVNode(1)), precision)
    pages = HostPages(layout, PAGE)
    pages.resize(num_pages)
    return pages


def new(pages: HostPages, length: int = LENGTH, seed: int = 0) -> tuple[Array, Array]:
    """Return random keys and values (kv_heads, length, dim)."""
    random, (layer, *_) = np.random.default_rng(seed), pages.layout.layers
    shape = HEADS, length
    keys = random.standard_normal((*shape, layer.key_dim), np.float32)
    return keys, random.standard_normal((*shape, layer.value_dim), np.float32)


def rounded(pages: HostPages, number: int, x: Array) -> Array:
    how = pages.layout.arrays[number].quantization
    return x if how is None else np.array(dequantize(quantize(mx.array(x), how), how))


def filled(
    precision: Precision, what: str = "keys and values alike"
) -> tuple[HostPages, list[Array]]:
    """Return pages with a sequence in `TABLE`, and its keys and values of layer 1, rounded."""
    pages = made(precision, what)
    both = new(pages)
    pages.write_row(1, *both, TABLE, 0)
    return pages, [rounded(pages, number, x) for number, x in enumerate(both, 2)]


def unpack(pages: HostPages, slot: int, end: int = LENGTH) -> None:
    """Copy values of the sequence in `TABLE` to an unpacked slot, as its passes do."""
    rows = ScratchRows(pages, Scratch(), [TABLE], [end], 256)
    rows.read(1, 0)
    both = [array[0] for array in rows.both(1)]
    pages.unpacked.copy(1, slot, slice(None), both, 0, end)
    pages.unpacked.filled(1, slot, end)


def check(pages: HostPages, expected: list[Array], table: tuple[int, ...] = TABLE) -> None:
    for number, x in enumerate(expected, 2):
        found = pages.read(number, table, x.shape[1])
        assert np.array_equal(np.array(found.array)[0], x)


@pytest.mark.parametrize("what", KINDS)
def test_rows_and_tokens_are_read_as_quantization_in_mlx_rounds_them(
    precision: Precision, what: str
) -> None:
    pages = made(precision, what)
    both = new(pages)
    expected = [rounded(pages, number, x) for number, x in enumerate(both, 2)]
    for start, end in ((0, 10), (10, 64), (64, 65), (65, 190)):
        keys, values = (x[:, start:end] for x in both)
        kept = pages.write_row(1, keys, values, TABLE, start)
        for ours, theirs in zip(kept, expected, strict=True):
            assert np.array_equal(ours, theirs[:, start:end])
    at = range(190, LENGTH)
    tokens = TokenPlaces(np.array([TABLE[p // PAGE] for p in at]), np.array([p % PAGE for p in at]))
    keys, values = (x[:, 190:].swapaxes(0, 1) for x in both)
    kept = pages.write_tokens(1, keys, values, tokens)
    for ours, theirs in zip(kept, expected, strict=True):
        assert np.array_equal(ours.swapaxes(0, 1), theirs[:, 190:])
    check(pages, expected)
    for number, x in enumerate(both, 2):
        how = pages.layout.arrays[number].quantization
        scales = pages.read(number, TABLE, LENGTH).scales
        assert (scales is None) == (how is None)
        if how is not None and scales is not None:
            theirs = quantize(mx.array(x), how).scales[: how.scales, None]
            assert mx.array_equal(scales, theirs)


def test_a_page_has_the_bytes_of_the_layout_and_is_the_same_in_another_place(
    precision: Precision,
) -> None:
    pages, expected = filled(precision)
    exporters = [pages.exporter(page) for page in TABLE]
    both = new(pages, seed=1)
    pages.write_row(1, *both, TABLE, 0)  # as a sequence that gets the pages does
    other = made(precision)
    for page, exporter in enumerate(exporters):
        payload = exporter()
        assert tuple(map(len, payload)) == pages.layout.page_buffers(PAGE)
        other.insert(page, payload)
        assert other.exporter(page)() == payload
    check(other, expected, (0, 1, 2, 3))
    with pytest.raises(ValueError, match="size"):
        other.insert(0, payload[:-1])
    with pytest.raises(ValueError, match="size"):
        other.insert(0, (payload[0][:-1], *payload[1:]))


def test_signed_codes_of_8_bits_have_a_scale_and_no_bias() -> None:
    pages, expected = filled(Precision(8))
    codes, scales = pages.exporter(TABLE[0])()
    (group,) = pages.layout.groups
    (shape, _), (scales_shape, _) = group.parts(PAGE)
    wide = np.frombuffer(scales, np.float16).reshape(scales_shape)[0].astype(np.float32)
    values = np.frombuffer(codes, np.int8).reshape(shape) * wide
    assert np.array_equal(values[2], expected[0][:, :PAGE])


def test_part_of_a_page_is_copied_and_the_rest_is_left(precision: Precision) -> None:
    pages, expected = filled(precision)
    pages.copy(TABLE[1], 7, 40)
    keys, values = (x[:, 104:] for x in new(pages))
    pages.write_row(1, keys, values, (TABLE[0], 7, 1, 2), 104)
    check(pages, expected, (TABLE[0], 7, 1, 2))
    before = pages.exporter(7)()
    pages.copy(TABLE[0], 7, 0)
    assert pages.exporter(7)() == before


@pytest.mark.parametrize("holds", [False, True])
def test_pages_that_remain_keep_their_content(precision: Precision, *, holds: bool) -> None:
    """Also where another array refers to the memory, which is then copied."""
    pages, expected = filled(precision)
    place = pages.places[2]
    held = place.group.codes if holds and place is not None else None
    del place
    for count in (1_000, 8, 7):
        pages.resize(count)
        check(pages, expected)
        assert pages.nbytes == count * sum(pages.layout.page_buffers(PAGE))
    pages.resize(0)
    assert pages.nbytes == 0
    pages.resize(7)
    assert not any(any(part) for part in pages.exporter(TABLE[0])()), "what is new is zero"
    assert held is None or held.any()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere memory is copied")
def test_pages_that_were_read_grow_in_place() -> None:
    pages, expected = filled(Precision(8))
    place = pages.places[2]
    assert place is not None
    rows = ScratchRows(pages, pages.scratch(0), [TABLE], [LENGTH], 256)
    rows.read(1, 0)
    pages.unpack(0, LENGTH)
    unpack(pages, 0)
    exporter = pages.exporter(0)
    before = list(place.group._memory)
    pages.resize(50_000)
    assert all(a is b for a, b in zip(place.group._memory, before, strict=True))
    for array in rows.both(1):
        array[...] = np.nan
    rows.read(1, 0)
    for array, x in zip(rows.both(1), expected, strict=True):
        assert np.array_equal(array[0, :, :LENGTH], x)
    assert pages.exporter(0)() == exporter()


@pytest.mark.parametrize("gives_back", [True, False])
@pytest.mark.parametrize("what", KINDS)
def test_unpacked_values_and_those_in_the_scratch_have_the_same_bits(
    precision: Precision, what: str, gives_back: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not gives_back:
        monkeypatch.setattr(host_memory, "CAN_GIVE_BACK", False)
    pages, expected = filled(precision, what)
    pages.unpack(3, LENGTH)
    pages.unpacked.begin([(3, 0, LENGTH)])
    unpack(pages, 3, 70)
    unpack(pages, 3)
    rows = ScratchRows(pages, pages.scratch(0), [TABLE, TABLE[:2]], [LENGTH, 70], 256)
    ways: list[Callable[[], None]] = [
        lambda: rows.read(1, 0),
        lambda: rows.read_together(1, 0),
        lambda: rows.read(1, 64),
    ]
    for low, way in zip((0, 0, 64), ways, strict=True):
        for array in rows.both(1):
            array[...] = np.nan
        way()
        for array, x in zip(rows.both(1), expected, strict=True):
            assert np.array_equal(array[0, :, low:LENGTH], x[:, low:])
            assert not array[0, :, LENGTH:].any()
            assert np.array_equal(array[1, :, low:70], x[:, low:70])
            assert not array[1, :, 70:].any()
    for array, x in zip(pages.unpacked.both(1), expected, strict=True):
        assert np.array_equal(array[3, :, :LENGTH], x)
        assert not array[3, :, LENGTH:].any() and not array[2].any() and not array[4].any()
    pages.unpack(3, 0)
    assert not any(array.any() for array in pages.unpacked.both(1))


def test_without_onnx_runtime_the_scratch_has_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pages, expected = filled(Precision(8))
    monkeypatch.setattr(graphs, "unusable", lambda: "it is not installed")
    monkeypatch.setattr(scratch, "_session", None)
    rows = ScratchRows(pages, pages.scratch(0), [TABLE], [LENGTH], 256)
    rows.read_together(1, 0)
    for array, x in zip(rows.both(1), expected, strict=True):
        assert np.array_equal(array[0, :, :LENGTH], x)


def test_nan_behind_a_row_or_left_by_another_never_reaches_it(precision: Precision) -> None:
    pages, _ = filled(precision)
    keys, values = (np.full_like(x, np.nan) for x in new(pages, 256))
    pages.write_row(1, keys, values, TABLE, 0)
    pages.unpack(1, LENGTH)
    pages.unpacked.begin([(1, 0, LENGTH)])
    unpack(pages, 1)
    assert all(np.isnan(array[1, :, :LENGTH]).all() for array in pages.unpacked.both(1))
    pages.drop(1)
    both = new(pages, 70)
    pages.write_row(1, *both, TABLE, 0)
    pages.unpack(1, LENGTH)
    unpack(pages, 1, 70)
    rows = ScratchRows(pages, pages.scratch(0), [TABLE], [70], 256)
    rows.both(1)[0][...] = np.nan
    rows.both(1)[1][...] = np.nan
    rows.read(1, 0)
    for array in (*pages.unpacked.both(1), *rows.both(1)):
        assert np.isfinite(array).all()


def test_unpacked_rows_take_memory_for_their_values_and_stay_in_place() -> None:
    pages, expected = filled(Precision(8))
    before = pages.nbytes
    pages.unpack(2, 100)
    arrays = pages.unpacked.both(1)
    unpack(pages, 2)
    assert pages.nbytes == before + LENGTH * pages.layout.value_bytes // 2
    pages.unpack(5, pages.unpacked.capacity)
    assert pages.unpacked.both(1)[0] is arrays[0]
    pages.unpack(5, pages.unpacked.capacity + 1)  # they are elsewhere, and filled again
    assert pages.unpacked.both(1)[0] is not arrays[0] and not pages.unpacked.ends[1]
    assert 2 in pages.unpacked and 5 in pages.unpacked
    pages.unpack(100, 10)
    assert all(len(array) > 100 for array in pages.unpacked.both(1))
    for slot in (2, 5, 100, 7):
        pages.unpack(slot, 0)
    assert pages.nbytes == before and not any(slot in pages.unpacked for slot in range(101))
    check(pages, expected)


def test_long_rows_with_a_cached_prefix_are_unpacked_in_parts_after_a_few_passes() -> None:
    """Memory that nothing was written to before takes time. A short row is unpacked at once."""
    pages = made(Precision(8), num_pages=40)
    rows = pages.unpacked
    for slot in (0, 1, 2):
        pages.unpack(slot, 2_000)
    began = rows.begin([(0, 0, 10), (1, 1_200, 1_201), (2, 300, 301), (5, 0, 1)])
    assert began == ([0], {2: 301})
    for step in range(1, FIRST_PASSES):
        began = rows.begin([(0, 9 + step, 10 + step), (1, 1_200 + step, 1_201 + step)])
        assert began == ([0], {})
    found = [rows.begin([(1, 1_210 + i, 1_211 + i), (2, 301 + i, 302 + i)]) for i in range(4)]
    assert [began.copied for began in found] == [{0: 512}, {0: 1024}, {0: 1_213}, {}]
    assert [began.members for began in found] == [[1], [1], [1], [0, 1]]
    pages.unpack(0, rows.capacity + 1)  # the arrays are others
    found = [rows.begin([(1, 1_220 + i, 1_221 + i), (2, 310 + i, 311 + i)]) for i in range(5)]
    assert [began.copied for began in found] == [{0: 512}, {0: 1024}, {0: 1_223, 1: 313}, {}, {}]
    assert [began.members for began in found] == [[], [], [], [0, 1], [0, 1]]


def test_rows_are_unpacked_at_once_where_earlier_ones_had_their_memory() -> None:
    pages = made(Precision(8), num_pages=40)
    for slot in (0, 1):
        pages.unpack(slot, 2_000)
    pages.unpacked.begin([(0, 0, 1_500), (1, 0, 900)])
    for slot in (0, 1):
        pages.drop(slot)
        pages.unpack(slot, 2_000)
    began = pages.unpacked.begin([(0, 1_499, 1_500), (1, 1_450, 1_451)])
    assert began == ([], {0: 1_500}), "551 positions of the other have no memory"
    assert pages.unpacked.begin([(1, 1_411, 1_412)]) == ([], {0: 1_412})


def test_memory_of_freed_slots_is_kept_for_the_next_ones_up_to_a_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pages, _ = filled(Precision(8))
    monkeypatch.setattr(unpacked, "IDLE_BYTES", 2 * LENGTH * pages.layout.value_bytes)
    for slot in (0, 1, 2):
        pages.unpack(slot, LENGTH)
        pages.unpacked.begin([(slot, 0, LENGTH)])
        unpack(pages, slot)
    for slot in (0, 1, 2):
        pages.drop(slot)
    keys, _ = pages.unpacked.both(1)
    assert [keys[slot].any() for slot in (0, 1, 2)] == [False, True, True]
    pages.unpack(1, LENGTH)
    unpack(pages, 1, 10)
    assert keys[1, :, :10].any() and not keys[1, :, 10:].any()
