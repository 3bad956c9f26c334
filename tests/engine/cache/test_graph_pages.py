"""Pages in MLX's memory."""

import mlx.core as mx
import numpy as np
import pytest

from engine.batch.graph import GraphBatch
from engine.batch.ragged import Row
from engine.cache.graph_pages import GraphPages
from engine.cache.layout import AttentionLayout, KVNode, Layout
from engine.cache.quantization import Precision, dequantize, quantize
from engine.cache.slots import Slots
from engine.cpu.pages.host_pages import HostPages
from engine.plan import Table

PAGE = 32
LAYERS = (
    AttentionLayout(2, 64, 64, mx.float32, None),
    AttentionLayout(1, 80, 32, mx.float32, 9),
    AttentionLayout(2, 64, 64, mx.float32, None),
    AttentionLayout(1, 48, 0, mx.float32, None),  # keys alone
    AttentionLayout(2, 12, 64, mx.float32, None),  # keys that are never quantized
)
LAYOUT = Layout(LAYERS, (), tuple(KVNode(i) for i in range(len(LAYERS))))


def written(bits: int, tokens: int = 75) -> tuple[Slots, list[mx.array]]:
    """Return pages with a row, and the row's keys and values by number of the array."""
    layout = LAYOUT.with_precision(Precision(bits))
    slots = Slots(GraphPages(layout, PAGE, 6))
    slots.change(Table(0, 0, (4, 1, 5)))
    batch, new = GraphBatch(layout, slots, [Row(0, 0, tokens)]), []
    for number, layer in enumerate(LAYERS):
        both = [
            mx.random.normal((1, layer.kv_heads, tokens, dim)) * 10.0 ** mx.random.randint(-4, 4)
            for dim in (layer.key_dim, layer.value_dim)
        ]
        batch.write(number, both[0], both[1])
        new += both
    mx.eval(slots.pages.contents)
    return slots, new


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_pages_hold_what_quantization_defines_bit_for_bit(bits: int) -> None:
    slots, new = written(bits)
    for number, array in enumerate(new):
        found = slots.pages.read(number, slots.tables[0], 75)
        how = slots.pages.layout.arrays[number].quantization
        if how is None:
            assert found.scales is None and mx.array_equal(found.array, array)
            continue
        expected = quantize(array, how)
        assert found.scales is not None
        assert mx.array_equal(found.scales, expected.scales[: how.scales])
        assert mx.array_equal(found.array, dequantize(expected, how))


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_a_page_has_the_same_bytes_on_every_device(bits: int) -> None:
    slots, new = written(bits, 3 * PAGE)
    layout = slots.pages.layout
    host = HostPages(layout, PAGE)
    host.resize(6)
    for page in (4, 1, 5):
        host.insert(page, slots.pages.exporter(page)())
    again = GraphPages(layout, PAGE, 6)
    for page in (4, 1, 5):
        again.insert(page, host.exporter(page)())
    for number in range(len(new)):
        wanted = slots.pages.read(number, (4, 1, 5), 96)
        for other in (host, again):
            found = other.read(number, (4, 1, 5), 96)
            assert mx.array_equal(found.array, wanted.array)
            if wanted.scales is not None:
                assert found.scales is not None and mx.array_equal(found.scales, wanted.scales)


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_a_part_of_a_page_is_exported_with_zeros_behind_it(bits: int) -> None:
    slots, _ = written(bits, 3 * PAGE)
    host = HostPages(slots.pages.layout, PAGE)
    host.resize(2)
    host.insert(0, slots.pages.exporter(4)())
    payload = slots.pages.exporter(4, 20)()
    assert payload == host.exporter(0, 20)() != host.exporter(0)()
    host.copy(0, 1, 20)  # to a page of zeros
    assert payload == host.exporter(1)()


def test_a_page_of_another_size_is_refused() -> None:
    slots, _ = written(8)
    payload = slots.pages.exporter(1)()
    for wrong in (payload[1:], (*payload[:-1], bytes(payload[-1]) + b"\0")):
        with pytest.raises(ValueError, match="size of a page"):
            slots.pages.insert(2, wrong)


def test_exported_bytes_are_those_before_a_page_is_overwritten() -> None:
    slots, _ = written(8)
    wanted = slots.pages.exporter(1)()
    export = slots.pages.exporter(1)
    arrays = slots.pages.take_exporting()
    assert len(arrays) == 2 * len(LAYERS) and not slots.pages.take_exporting()
    slots.pages.copy(4, 1, PAGE)
    assert export() == wanted != slots.pages.exporter(1)()


@pytest.mark.parametrize("positions", [1, PAGE])
def test_copied_pages_and_remaining_pages_keep_their_content(positions: int) -> None:
    slots, new = written(8)
    pages = slots.pages
    before = [pages.read(number, (4, 1, 5), 75).array for number in range(len(new))]
    pages.copy(1, 0, positions)
    for number, array in enumerate(before):
        found = pages.read(number, (0,), positions).array
        assert mx.array_equal(found, array[:, :, PAGE : PAGE + positions])
    for count in (40, 7, 6):
        pages.resize(count)
        assert pages.num_pages == count
        for number, array in enumerate(before):
            assert mx.array_equal(pages.read(number, (4, 1, 5), 75).array, array)


def test_nothing_but_one_layer_is_copied() -> None:
    layer = AttentionLayout(4, 64, 64, mx.bfloat16, None)
    layout = Layout((layer,) * 8, (), tuple(KVNode(i) for i in range(8)))
    pages = GraphPages(layout, 64, 64)

    def peak() -> float:
        mx.eval(pages.contents)
        found = (mx.get_peak_memory() - before) / (pages.nbytes / 8)
        mx.reset_peak_memory()
        return found

    payload = pages.exporter(3)()
    pages.take_exporting()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    pages.copy(3, 5, 64)
    assert peak() < 0.5
    pages.insert(7, payload)
    assert peak() < 0.5
    old = pages.nbytes
    pages.resize(65)
    assert peak() < 1.3
    pages.resize(32)
    assert mx.get_active_memory() - before < -0.45 * old
    assert np.isclose(pages.nbytes, old / 2)
