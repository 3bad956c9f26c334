"""Attention outside MLX: a query has the same bits in every chunk, row and batch."""

from collections.abc import Collection
from itertools import combinations, pairwise
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import pytest

from engine.batch.ragged import Row
from engine.cache.layout import AttentionLayout, KVNode, Layout
from engine.cache.quantization import UNQUANTIZED, Precision
from engine.cpu.attention import few_tokens, single_tokens, tiles
from engine.cpu.attention import host_batch as host
from engine.cpu.attention.host_batch import HostBatch
from engine.cpu.attention.pieces import How
from engine.cpu.attention.scratch import ScratchRows
from engine.cpu.pages import unpacked
from engine.cpu.pages.host_pages import HostPages
from engine.cpu.pages.rounding import Array
from engine.plan import Table
from tests.engine.cpu.attention import paged
from tests.engine.cpu.attention.paged import host_slots, spoil

pytestmark = pytest.mark.skipif(mx.default_device() == mx.gpu, reason="for CPUs")

LENGTH, ROWS, HEADS = 350, 4, 2
Parts = dict[int, tuple[int, int]]
"""The first position, and the one after the last, of each row."""


class Exact(HostBatch):
    deterministic = True


class Case(NamedTuple):
    group: int = 3
    dim: int = 64
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    value_dim: int | None = None


CASES = {
    "one query for a head of keys": Case(group=1),
    "three": Case(),
    "four": Case(group=4, dim=128),
    "eight": Case(group=8, dim=32),
    "narrow": Case(dim=16),
    "wide": Case(group=2, dim=256),
    "of no width for the op": Case(dim=36),
    "80 wide": Case(dim=80),
    "other values": Case(dim=64, value_dim=32),
    "a short window": Case(window=33),
    "a long window": Case(group=2, window=300, dim=128),
    "scores within bounds": Case(softcap=3.0),
    "sinks": Case(sinks=True),
    "sinks, a window, one query": Case(group=1, sinks=True, window=40),
}


class Text:
    """Rows of random keys, values and queries in pages anywhere, and their attention.

    Some rows are unpacked; pages and unpacked rows hold NaN wherever nothing was written."""

    def __init__(
        self, case: Case, unpacked: Collection[int] = (), precision: Precision = UNQUANTIZED
    ) -> None:
        self.case, random = case, np.random.default_rng(len(str(case)))
        values = case.value_dim or case.dim
        layer = AttentionLayout(HEADS, case.dim, values, mx.float32, case.window)
        self.layout = Layout((layer,), (), (KVNode(0),), precision)
        self.slots = host_slots(self.layout, ROWS, LENGTH, unpacked)
        assert isinstance(self.slots.pages, HostPages)
        self.pages = self.slots.pages
        shape = ROWS, HEADS, LENGTH
        self.keys: Array = random.standard_normal((*shape, case.dim), np.float32)
        self.values: Array = random.standard_normal((*shape, values), np.float32)
        queries = random.standard_normal((ROWS, HEADS, case.group, LENGTH, case.dim), np.float32)
        self.queries: Array = queries / np.float32(case.dim**0.5)
        self.sinks = None
        if case.sinks:
            self.sinks = random.standard_normal((HEADS, case.group, 1, 1), np.float32)

    def computed(self, kind: type[HostBatch], parts: Parts) -> list[Array]:
        """Return the attention of a pass with these positions of each row: (heads, group, ...)."""
        rows = [Row(number, *part) for number, part in sorted(parts.items())]
        batch = kind(self.layout, self.slots, rows)

        def given(array: Array) -> Any:
            each = [array[row.slot, ..., row.start : row.end, :] for row in rows]
            if not batch.by_token:
                return each
            return np.concatenate([np.moveaxis(one, -2, 0) for one in each])[..., None, :]

        batch.store(0, given(self.keys), given(self.values))
        asked = given(self.queries)
        dim = self.values.shape[-1]
        if not batch.by_token:
            out: Any = [np.empty((*one.shape[:-1], dim), np.float32) for one in asked]
        else:
            out = np.empty((*asked.shape[:-1], dim), np.float32)
        batch.attend_to(0, asked, out, self.case.window, self.sinks, self.case.softcap)
        if not batch.by_token:
            return list(out)
        cuts = pairwise(batch.first_tokens)
        return [np.moveaxis(out[a:b, ..., 0, :], 0, -2) for a, b in cuts]

    def whole(self, kind: type[HostBatch]) -> list[Array]:
        return [self.computed(kind, {number: (0, LENGTH)})[0] for number in range(ROWS)]

    def check(self, kind: type[HostBatch], parts: Parts, whole: list[Array]) -> None:
        """Compare a pass with these positions of each row with ``whole`` rows, bit for bit."""
        found = self.computed(kind, parts)
        for one, (number, (start, end)) in zip(found, sorted(parts.items()), strict=True):
            assert np.array_equal(one, whole[number][..., start:end, :]), (number, parts)

    def expected(self, number: int) -> Any:
        """Return the attention of a row, in twice the precision."""
        keys, values, queries = (
            array[number].astype(np.float64) for array in (self.keys, self.values, self.queries)
        )
        scores = queries @ keys[:, None].swapaxes(-1, -2)
        if self.case.softcap is not None:
            scores = np.tanh(scores / self.case.softcap) * self.case.softcap
        positions = np.arange(LENGTH)
        behind = positions[:, None] - positions
        scores[:, :, (behind < 0) | (behind >= (self.case.window or LENGTH))] = -np.inf
        shares = np.exp(scores)
        total = shares.sum(-1, keepdims=True)
        return (
            shares @ values[:, None] / (total if self.sinks is None else total + np.exp(self.sinks))
        )


@pytest.mark.parametrize("what", CASES)
@pytest.mark.parametrize("precision", [UNQUANTIZED, Precision(8, 16)])
def test_a_row_whose_heads_threads_share_has_the_same_bits(
    what: str, precision: Precision, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = Text(CASES[what], (), precision)
    whole = text.whole(Exact)
    monkeypatch.setattr(host, "SAME_BITS_WORTH_THREADS", 0)
    monkeypatch.setattr(host, "num_threads", lambda: 2)
    used: list[str] = []
    read = ScratchRows.read

    def noted(rows: ScratchRows, layer: int, low: int) -> None:
        used.append(str(rows.heads(layer)))
        read(rows, layer, low)

    monkeypatch.setattr(ScratchRows, "read", noted)
    for start, end in 4 * ((330, 343), (343, 344), (344, 350)):
        used.clear()
        text.check(Exact, {1: (start, end)}, whole)
        assert sorted(used) == ["slice(0, 1, None)", "slice(1, 2, None)"]


@pytest.mark.parametrize("what", CASES)
@pytest.mark.parametrize("unpacked", [(), (0, 1, 2, 3), (1, 2)])
def test_a_query_has_the_same_bits_in_every_chunk_and_batch(
    what: str, unpacked: tuple[int, ...]
) -> None:
    text = Text(CASES[what], unpacked)
    whole = text.whole(Exact)
    for number in range(ROWS):
        assert np.allclose(whole[number], text.expected(number), rtol=1e-4, atol=2e-6)
    random = np.random.default_rng(1)
    # One row in chunks of any length.
    cuts = [0, *sorted(random.choice(np.arange(1, LENGTH), 9, replace=False)), LENGTH]
    for start, end in pairwise(map(int, cuts)):
        text.check(Exact, {1: (start, end)}, whole)
    for widest in (1, 2, 5, 17, 90):  # any rows together: single tokens, drafts, chunks
        for _ in range(2):
            members = random.choice(ROWS, random.integers(1, ROWS + 1), replace=False)
            ends = random.integers(widest, LENGTH + 1, len(members))
            widths = random.integers(1, widest + 1, len(members))
            parts = {
                int(number): (int(end - width), int(end))
                for number, end, width in zip(members, ends, widths, strict=True)
            }
            text.check(Exact, parts, whole)


@pytest.mark.parametrize("what", ["three", "four", "a short window", "sinks"])
def test_chunks_of_a_prompt_and_drafts_have_the_same_bits_by_default_too(what: str) -> None:
    text = Text(CASES[what])
    exact, whole = text.whole(Exact), text.whole(HostBatch)
    for number in range(ROWS):
        assert np.array_equal(whole[number], exact[number])
    for cuts in ([0, 130, 300, 323, LENGTH], [0, 64, 128, 330, LENGTH]):
        for start, end in pairwise(cuts):
            text.check(HostBatch, {0: (start, end), 2: (0, 20)}, whole)
    text.check(HostBatch, {0: (200, 203), 1: (300, 303), 3: (90, 92)}, whole)


@pytest.mark.parametrize("what", ["three", "scores within bounds", "sinks"])
def test_rows_have_the_same_bits_where_they_are_computed_otherwise(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long rows are copied head by head, and sums may depend on their length."""
    text = Text(CASES[what])
    whole = text.whole(Exact)
    few = {0: (200, 201), 1: (LENGTH - 3, LENGTH), 3: (90, 92)}
    single = {0: (200, 201), 1: (LENGTH - 1, LENGTH), 3: (128, 129)}
    for owner, name, value, parts in (
        (few_tokens, "MAX_COPIED_BYTES", 0, few),
        (single_tokens, "same_bits", lambda _: False, single),
    ):
        with monkeypatch.context() as changed:
            changed.setattr(owner, name, value)
            text.check(Exact, parts, whole)


@pytest.mark.parametrize("what", ["three", "one query for a head of keys", "sinks"])
def test_steps_have_the_same_bits_while_sequences_begin_grow_end_and_are_unpacked(
    what: str,
) -> None:
    text = Text(CASES[what])
    whole = text.whole(Exact)
    groups = [{0: 200, 1: 130, 3: 90}] * 3 + [{0: 203, 3: 93}] + [{0: 204, 2: 301, 3: 127}] * 4
    for step, ends in enumerate([*groups, *groups]):
        for slot in (1, 3) if step == 1 else (0, 2) if step == len(groups) else ():
            text.pages.unpack(slot, LENGTH)
        if step == len(groups) + 2:  # elsewhere in memory
            text.pages.unpack(0, 4 * text.pages.unpacked.capacity)
        if step == len(groups) + 3:
            text.pages.unpack(0, 0)
        parts = {number: (end + step, end + step + 1) for number, end in ends.items()}
        text.check(Exact, parts, whole)


@pytest.mark.parametrize("unpacked", [(), (0,), (0, 1)])
def test_a_row_continues_behind_pages_that_another_one_computed(unpacked: tuple[int, ...]) -> None:
    text = Text(CASES["three"], unpacked, Precision(8))
    for array in (text.keys, text.values, text.queries):
        array[0] = array[1]
    whole = text.whole(Exact)
    for slot in range(ROWS):
        text.pages.drop(slot)
    for slot in unpacked:
        text.pages.unpack(slot, LENGTH)
    spoil(text.pages)
    text.check(Exact, {0: (0, 40), 1: (0, 330)}, whole)
    own, other = text.slots.tables[0][5], text.slots.tables[1]
    text.pages.copy(other[5], own, 5)
    text.slots.change(Table(0, 0, (*other[:5], own)))
    text.check(Exact, {0: (325, 340), 1: (330, 331)}, whole)


@pytest.mark.parametrize("tokens", [0, LENGTH])
def test_rows_are_unpacked_or_dropped_in_the_middle_of_a_pass(
    tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is unpacked then is read from its pages until the next pass."""
    monkeypatch.setattr(unpacked, "FIRST_PASSES", 0)
    text = Text(CASES["three"], () if tokens else (0, 1), Precision(8))
    whole = text.whole(Exact)
    rows = [Row(0, 100, 160), Row(1, 100, 160)]
    batch = Exact(text.layout, text.slots, rows)
    assert bool(batch._unpacked) != bool(tokens)
    batch.pause()
    text.pages.unpack(1, tokens)
    batch.resume()
    its = slice(100, 160)
    batch.store(0, list(text.keys[:2, :, its]), list(text.values[:2, :, its]))
    out = [np.empty((HEADS, 3, 60, 64), np.float32) for _ in rows]
    batch.attend_to(0, list(text.queries[:2, :, :, its]), out, None)
    for found, expected in zip(out, whole, strict=False):
        assert np.array_equal(found, expected[..., its, :])
    assert text.pages.unpacked.ends[0] == ({} if tokens else {0: 160})


def test_a_layer_that_nobody_attends_to_is_unpacked_too() -> None:
    """A chunk stores the keys and values of the last layer, and attends in the layers before it."""
    text = Text(CASES["three"], (), Precision(8))
    whole = text.whole(Exact)
    text.pages.unpack(1, LENGTH)
    for start, end in ((300, 340), (340, 341)):
        batch = Exact(text.layout, text.slots, [Row(1, start, end)])
        both = [array[1:2, :, start:end] for array in (text.keys, text.values)]
        if batch.by_token:
            both = [np.moveaxis(array[0], 1, 0)[:, :, None] for array in both]
        batch.store(0, *both)
        batch.attend_to_nothing(0)
    assert batch._unpacked == [0]
    text.check(Exact, {1: (341, LENGTH)}, whole)


def test_a_pass_counts_once_in_however_many_stretches_it_is_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A long row with a cached prefix is unpacked after a few passes."""
    monkeypatch.setattr(unpacked, "NEW_AT_ONCE", 100)
    text = Text(CASES["three"], (), Precision(8))
    text.whole(Exact)
    text.pages.unpack(0, LENGTH)
    batch = Exact(text.layout, text.slots, [Row(0, 100, 160)])
    for _ in range(2 * unpacked.FIRST_PASSES):
        assert not batch._began.copied
        batch.pause()
        batch.resume()
    for _ in range(unpacked.FIRST_PASSES):
        batch = Exact(text.layout, text.slots, [Row(0, 100, 160)])
        found = batch._began
    assert found == ([], {0: 100})


def test_arguments_are_kept_for_few_groups_of_rows_and_not_beyond_their_arrays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = Text(CASES["three"], range(ROWS))
    text.whole(Exact)
    rows, kept = text.pages.unpacked, single_tokens._kept
    monkeypatch.setattr(single_tokens, "MAX_KEPT", 5)
    for count in range(1, ROWS + 1):
        for numbers in combinations(range(ROWS), count):
            text.computed(Exact, dict.fromkeys(numbers, (200, 201)))
    assert len(kept[rows]) == 5
    before = len(kept)
    del rows, text
    assert len(kept) == before - 1


@pytest.mark.parametrize(
    ("width", "heads", "threads", "parts"),
    [(270, 3, 2, 4), (270, 8, 2, 3), (40, 3, 2, 2), (20, 3, 2, 1), (40, 1, 4, 4), (2, 1, 4, 2)],
)
def test_a_chunk_has_equally_many_products_for_each_thread_where_these_are_large_enough(
    width: int, heads: int, threads: int, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "num_threads", lambda: threads)
    cuts = tiles.cut(Row(0, 100, 100 + width), heads, 3)
    assert len(cuts) == parts
    assert [cuts[0][0], *(end for _, end in cuts)] == [*(start for start, _ in cuts), width]


@pytest.mark.parametrize("unpacked", [(), (0, 2)])
@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("what", ["three", "80 wide", "a short window", "sinks"])
def test_quantized_rows_have_the_same_bits_in_every_chunk_and_batch(
    what: str, bits: int, unpacked: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with pages of another size."""
    text = Text(CASES[what], unpacked, Precision(bits))
    monkeypatch.setattr(paged, "PAGE", 96)
    whole = Text(CASES[what], range(ROWS), Precision(bits)).whole(Exact)
    for start, end in ((0, 100), (100, 101), (101, 118), (118, 333), (333, LENGTH)):
        text.check(Exact, dict.fromkeys(range(ROWS), (start, end)), whole)
    text.check(Exact, {0: (0, LENGTH), 2: (40, 41), 3: (200, 301)}, whole)


@pytest.mark.parametrize("kind", [HostBatch, Exact])
def test_what_a_slot_held_before_is_no_part_of_a_sequence(kind: type[HostBatch]) -> None:
    text = Text(CASES["three"], range(ROWS), Precision(8))
    clean = text.whole(kind)
    after = text.computed(kind, dict.fromkeys(range(ROWS), (100, 101)))
    keys = text.keys.copy()
    text.keys[...] = np.nan
    text.whole(kind)
    for slot in range(ROWS):
        text.pages.drop(slot)
    text.keys = keys
    for slot in (1, 2):
        text.pages.unpack(slot, LENGTH)
    for number in range(ROWS):
        assert np.array_equal(
            text.computed(kind, {number: (0, 100)})[0], clean[number][..., :100, :]
        )
    found = text.computed(kind, dict.fromkeys(range(ROWS), (100, 101)))
    assert all(np.allclose(*each, rtol=1e-5, atol=1e-6) for each in zip(found, after, strict=True))


@pytest.mark.parametrize("what", ["three", "sinks", "one query for a head of keys"])
def test_products_of_many_shapes_share_the_memory_of_a_thread(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They grow, shrink, are dropped and, above a limit, have memory of their own."""
    text, kept = Text(CASES[what], [0]), tiles._KeptProducts()
    whole = text.computed(HostBatch, {0: (0, LENGTH)})[0]
    queries, sinks = text.queries[0, 0], None if text.sinks is None else text.sinks[0]
    both = [array[0, 0] for array in text.pages.unpacked.both(0)]
    monkeypatch.setattr(tiles, "_kept", kept)
    monkeypatch.setattr(tiles, "MAX_KEPT", 3)
    monkeypatch.setattr(tiles, "MAX_KEPT_FLOATS", 300 * LENGTH)
    for start, end in [(0, 10), (300, 301), (5, 130), (300, 301), (222, 350), (60, 70), (0, 10)]:
        out: Array = np.empty((len(queries), end - start, both[1].shape[1]), np.float32)
        how = How(None, None, None)
        tiles.attend(queries[:, start:end], both, start, how, sinks, out)
        assert np.array_equal(out, whole[0][:, start:end]), (start, end)
        assert len(kept._products) <= 3
        assert len(kept._memory) <= 300 * LENGTH
