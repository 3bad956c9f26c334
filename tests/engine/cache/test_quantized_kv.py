"""Executors over quantized KV against mlx-lm's own caches that hold the same codes."""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest

from engine import device
from engine.batch.dense import DenseBatch, RowBatch
from engine.batch.gpu import GPUBatch
from engine.batch.graph import GraphBatch
from engine.batch.ragged import RaggedBatch
from engine.cache.layout import Layout, probe_layout
from engine.cache.quantization import (
    Precision,
    Quantized,
    codes_of,
    dequantize,
    with_biases,
)
from engine.cpu.attention.host_batch import HostBatch
from engine.cpu.pages.host_pages import HostPages
from engine.executor.batched import BatchedExecutor
from engine.executor.serial import SerialExecutor
from engine.plan import Chunk, CopyPage, Decode, Export, Insert, Slot
from engine.proving import choose as choosing
from engine.proving import oracle, trial
from engine.proving.choose import choose_executor
from engine.proving.proof import NotBatchable
from engine.proving.replay import Replay, RoundingMismatch
from engine.proving.trial import GREEDY, Trial
from tests.engine.conftest import Wrap
from tests.engine.executor.by_hand import PlanRunner
from tests.tiny_models import KINDS, VOCAB_SIZE, Kind, make_tiny
from zoo.build import build
from zoo.examine import LENGTHS, STEPS, TOLERANCE

PAGE = 16


@pytest.fixture(scope="module", autouse=True)
def prepared() -> None:
    device.prepare()


@cache
def load(path: Path) -> Any:
    return mlx_lm.load(str(path))[0]


def distance(executor: BatchedExecutor, model: Any) -> float:
    """Return how far logits are from mlx-lm's.

    Sequences run in chunks, join and leave, are rewound and moved, and share pages."""
    made = Trial(executor, Replay(model, executor))
    made.run_all(
        [
            oracle.make_reference(model, length, STEPS, VOCAB_SIZE, seed, num_ways=0)
            for seed, length in enumerate(LENGTHS)
        ]
    )
    return made.max_difference


def distance_of(model: Any, layout: Layout, batch_class: type[RaggedBatch]) -> float:
    return distance(BatchedExecutor(model, layout, PAGE, batch_class), model)


@pytest.mark.parametrize(
    ("kind", "bits"), [(kind, 8 if i % 2 else 4) for i, kind in enumerate(KINDS)]
)
def test_every_kind_gives_mlx_lms_logits_with_the_executor_chosen_for_it(
    tiny_model: Callable[..., Path], kind: Kind, bits: int
) -> None:
    model, precision = load(tiny_model(kind)), Precision(bits)
    executor, _, whole = choose_executor(model, VOCAB_SIZE, PAGE, precision)
    assert isinstance(executor, BatchedExecutor) and not whole
    assert distance(executor, model) < TOLERANCE


@pytest.mark.parametrize(
    ("kind", "batch_class", "bits"),
    [
        ("gpt_oss", HostBatch, 8),
        ("qwen3", GraphBatch, 8),
        ("gpt_oss", GPUBatch, 8),
        ("gemma3", GPUBatch, 4),
        ("gemma3", DenseBatch, 4),
        ("gpt_oss", DenseBatch, 8),
        ("gpt_oss", RowBatch, 8),
    ],
)
def test_every_batch_class_gives_mlx_lms_logits(
    tiny_model: Callable[..., Path], kind: Kind, batch_class: type[RaggedBatch], bits: int
) -> None:
    model = load(tiny_model(kind))
    layout = probe_layout(model).with_precision(Precision(bits))
    assert distance_of(model, layout, batch_class) < TOLERANCE


@pytest.mark.parametrize(("name", "bits"), [("deepseek_v3", 8), ("gemma2", 4)])
def test_latents_and_keys_under_softcaps_are_quantized(
    name: str, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    precision = Precision(bits)
    monkeypatch.setattr(device, "batch_classes", lambda *_: [GraphBatch])  # none knows softcaps
    model = build(name)
    executor, reason, _ = choose_executor(model, VOCAB_SIZE, PAGE, precision)
    assert isinstance(executor, BatchedExecutor)
    assert executor.spec.kv_bits == bits and reason
    assert distance(executor, model) < TOLERANCE


class TestTheComparisonCatches:
    """Errors in what is stored, however little they change the logits."""

    def is_wrong(self, path: Path, batch_class: type[RaggedBatch] = HostBatch) -> None:
        model = load(path)
        layout = probe_layout(model).with_precision(Precision(8))
        with pytest.raises(RoundingMismatch, match="that differ from mlx-lm's"):
            distance_of(model, layout, batch_class)

    @pytest.mark.parametrize("batch_class", [HostBatch, GraphBatch])
    def test_pages_that_lose_their_scales(
        self, llama: Path, wrap: Wrap, batch_class: type[RaggedBatch]
    ) -> None:
        @wrap(batch_class.pages_class, "insert")
        def unscaled(insert: Any, pages: Any, page: int, payload: Any) -> None:
            codes, scales = payload
            insert(pages, page, (codes, np.full(len(scales) // 2, 1, np.float16).tobytes()))

        self.is_wrong(llama, batch_class)

    @pytest.mark.parametrize("batch_class", [HostBatch, GraphBatch])
    def test_values_of_another_page(
        self, llama: Path, wrap: Wrap, batch_class: type[RaggedBatch]
    ) -> None:
        @wrap(batch_class.pages_class, "copy")
        def elsewhere(copy: Any, pages: Any, source: int, target: int, positions: int) -> None:
            copy(pages, source + 1, target, positions)

        self.is_wrong(llama, batch_class)


# -- what pages hold -----------------------------------------------------------------


class Store(PlanRunner):
    """Drives an executor to store, export and insert pages, without sampling."""

    def __init__(
        self, model: Any, batch_class: type[RaggedBatch] = HostBatch, bits: int = 8
    ) -> None:
        layout = probe_layout(model).with_precision(Precision(bits))
        executor = BatchedExecutor(model, layout, PAGE, batch_class)
        super().__init__(executor, 4, 128)

    def compute(self, slot: Slot, tokens: tuple[int, ...], *pieces: int) -> None:
        start = 0
        for end in (*pieces, len(tokens)):
            self.run(chunks=(Chunk(slot, start, tokens[start:end]),))
            start = end

    def table(self, slot: Slot, count: int) -> tuple[int, ...]:
        found: tuple[int, ...] = self.executor._slots.tables[slot][:count]
        return found

    def saved(self, slot: Slot, count: int) -> list[tuple[bytes, ...]]:
        """The bytes of the first ``count`` pages of ``slot``."""
        exports = tuple(Export(page, page) for page in self.table(slot, count))
        exported = self.run(exports_first=exports).exported
        return [tuple(bytes(part) for part in one.payload) for one in exported]

    def insert(self, payloads: Sequence[tuple[bytes, ...]], slot: Slot) -> None:
        pages = self.table(slot, len(payloads))
        inserts = (Insert(0, p, page) for p, page in zip(payloads, pages, strict=True))
        self.run(inserts=tuple(inserts))


WAYS = [(HostBatch, 8), (HostBatch, 4), (GraphBatch, 8), (GPUBatch, 8), (GraphBatch, 4)]
TOKENS = tuple(range(20, 20 + 3 * PAGE))


@pytest.mark.parametrize(("batch_class", "bits"), WAYS)
def test_a_page_has_the_same_bytes_after_it_was_inserted_copied_and_moved(
    tiny_model: Callable[..., Path], batch_class: type[RaggedBatch], bits: int
) -> None:
    """Nothing is quantized twice."""
    store = Store(load(tiny_model("gemma3")), batch_class, bits)
    store.compute(0, TOKENS)
    first = store.saved(0, 3)
    assert len(set(first)) == 3
    store.insert(first, 2)
    assert store.saved(2, 3) == first
    pairs = list(zip(store.table(2, 3), store.table(1, 3), strict=True))
    store.run(copies=tuple(CopyPage(*pair, PAGE) for pair in pairs))
    assert store.saved(1, 3) == first
    store.compute(3, TOKENS[::-1])
    pairs = list(zip(store.table(1, 3), store.table(3, 3), strict=True))
    store.run(moved_pages=tuple(CopyPage(*pair, PAGE) for pair in pairs), num_pages=40)
    assert store.saved(3, 3) == first


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_values_in_16_bits_are_the_same_from_inserted_pages(llama: Path, dtype: mx.Dtype) -> None:
    model = mlx_lm.load(str(llama))[0]
    model.set_dtype(dtype)
    store = Store(model, GPUBatch)
    store.compute(0, TOKENS, 20)
    store.insert(store.saved(0, 3), 2)
    whole, again = (store.executor.read_slot(row, len(TOKENS)) for row in (0, 2))
    for ours, theirs in zip(whole, again, strict=True):
        assert ours.array.dtype == dtype and mx.array_equal(ours.array, theirs.array)
        assert mx.any(ours.array != 0)


@pytest.mark.parametrize(
    ("kind", "length"), [("llama", 7), ("qwen3", 100), ("gemma3", 7), ("gemma3", 100)]
)
def test_attention_reads_dequantized_values_of_chunks_of_any_length(
    tiny_model: Callable[..., Path], kind: Kind, length: int
) -> None:
    """Arrays come to the pages in every memory order."""
    model = load(tiny_model(kind))
    ours = device.batch_classes(model, probe_layout(model))
    classes: list[type[RaggedBatch]] = [*ours, DenseBatch]
    for batch_class in classes:
        store = Store(model, batch_class)
        store.compute(0, tuple(range(5, 5 + length)))
        store.run(decodes=(Decode(0, length, 7, 0, GREEDY),))
        stored = store.executor.read_slot(0, length + 1)
        for kept, kind_of_array in zip(stored, store.executor.layout.arrays, strict=True):
            how = kind_of_array.quantization
            assert how is not None and kept.scales is not None
            assert mx.all(mx.max(mx.abs(kept.array), axis=-1) > 0)
            scales = with_biases(kept.scales)
            codes = codes_of(kept.array, scales, how)
            assert mx.array_equal(kept.array, dequantize(Quantized(codes, scales), how))


@pytest.mark.parametrize("bits", [4, 8, 16])
def test_pages_have_the_same_bytes_on_every_device(llama: Path, bits: int) -> None:
    model = load(llama)
    store, another = (Store(model, batch, bits) for batch in (HostBatch, GraphBatch))
    store.compute(0, TOKENS)
    pages = store.saved(0, 3)
    another.insert(pages, 1)
    assert another.saved(1, 3) == pages
    for ours, theirs in zip(
        store.executor.read_slot(0, 40), another.executor.read_slot(1, 40), strict=True
    ):
        assert mx.array_equal(ours.array, theirs.array)


def test_pages_do_not_depend_on_where_a_prompt_was_cut(tiny_model: Callable[..., Path]) -> None:
    """Except for single codes, which a different rounding in fp32 moved across a border."""
    store = Store(load(tiny_model("qwen3")))
    store.compute(0, TOKENS)
    store.compute(1, TOKENS, 5, 16, 17, 40)
    for one, two in zip(store.saved(0, 3), store.saved(1, 3), strict=True):
        (codes, others) = (np.frombuffer(payload[0], np.int8) for payload in (one, two))
        assert np.mean(codes != others) < 1e-3
    for ours, theirs in zip(*(store.executor.read_slot(row, 48) for row in (0, 1)), strict=True):
        gap = mx.max(mx.abs(ours.array - theirs.array))
        assert gap <= 0.02 * mx.max(mx.abs(ours.array))


# -- bytes, and what is not quantized -------------------------------------------------


@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("batch_class", [HostBatch, GraphBatch])
def test_pages_take_the_bytes_of_the_layout(
    tiny_model: Callable[..., Path], bits: int, batch_class: type[RaggedBatch]
) -> None:
    store = Store(load(tiny_model("gpt_oss")), batch_class, bits)
    layout = store.executor.layout
    store.compute(0, TOKENS)
    (page, *_) = store.saved(0, 3)
    assert sum(map(len, page)) == sum(layout.page_buffers(PAGE)) == PAGE * layout.token_bytes
    store.run(num_pages=100, freed_slots=(0, 1, 2, 3))
    pages = store.executor._pages
    idle_bytes = pages.unpacked.idle_bytes if isinstance(pages, HostPages) else 0
    assert pages.nbytes - idle_bytes == pytest.approx(100 * PAGE * layout.token_bytes, rel=0.1)


def test_heads_that_no_group_divides_stay_in_16_bits_and_are_reported(tmp_path: Path) -> None:
    model = load(make_tiny("llama", tmp_path, head_dim=24))
    executor, _, whole = choose_executor(model, VOCAB_SIZE, PAGE, Precision(8))
    assert executor.spec.kv_bits == 16
    assert whole == "2 of 2 layers: no group of 16 elements or more divides heads of 24"


def test_models_that_pages_cannot_hold_stay_in_16_bits() -> None:
    executor, _, whole = choose_executor(build("deepseek_v41"), VOCAB_SIZE, PAGE, Precision(8))
    assert isinstance(executor, SerialExecutor) and executor.spec.kv_bits == 16
    assert whole == "mlx-lm's own caches"


def test_a_model_that_fails_the_quantized_proof_runs_in_16_bits(llama: Path, wrap: Wrap) -> None:
    @wrap(choosing, "prove")
    def picky(prove: Any, model: Any, layout: Any, *rest: Any) -> None:
        if layout.kv_bits < 16:
            raise NotBatchable("its logits are wrong")
        prove(model, layout, *rest)

    executor, reason, whole = choose_executor(load(llama), VOCAB_SIZE, PAGE, Precision(8))
    assert (executor.spec.kv_bits, reason, whole) == (16, "", "any layer: its logits are wrong")
    assert trial.PAGE_TOKENS == PAGE
