"""Executors over quantized KV against mlx-lm's own caches that hold the same codes."""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest

from engine.batch import device
from engine.batch.cpu import host
from engine.batch.cpu.host import HostBatch
from engine.batch.dense import DenseBatch, RowBatch
from engine.batch.gpu import GPUBatch
from engine.batch.graph import GraphBatch
from engine.batch.places import Place
from engine.batch.ragged import RaggedBatch
from engine.cache import host_blocks, slabs
from engine.cache.layout import Layout, probe_layout
from engine.cache.quantization import (
    Precision,
    Quantization,
    Quantized,
    codes_of,
    dequantize,
    quantize,
    unpack,
)
from engine.cache.rounding import Kept
from engine.executor.batched import BatchedExecutor
from engine.executor.serial import SerialExecutor
from engine.plan import (
    Chunk,
    CopyPositions,
    Decode,
    Evict,
    Insert,
    Move,
    Restore,
    Save,
    SlabSpec,
    Slot,
)
from engine.proving import choose as choosing
from engine.proving import oracle, trial
from engine.proving.choose import choose_executor
from engine.proving.proof import NotBatchable
from engine.proving.replay import Replay, RoundingMismatch
from engine.proving.trial import GREEDY, Trial
from engine.zoo.build import build
from engine.zoo.examine import LENGTHS, STEPS, TOLERANCE
from tests.engine.conftest import Wrap
from tests.engine.executor.by_hand import PlanRunner
from tests.tiny_models import KINDS, VOCAB_SIZE, Kind, make_tiny

BLOCK = 16


@pytest.fixture(scope="module", autouse=True)
def prepared() -> None:
    device.prepare()


@cache
def load(path: Path) -> Any:
    return mlx_lm.load(str(path))[0]


def distance(executor: BatchedExecutor, model: Any) -> float:
    """Return how far logits are from mlx-lm's.

    Sequences run in chunks, join and leave, are rewound and moved, and start from blocks."""
    made = Trial(executor, Replay(model, executor))
    made.run_all(
        [
            oracle.make_reference(model, length, STEPS, VOCAB_SIZE, seed, num_ways=0)
            for seed, length in enumerate(LENGTHS)
        ]
    )
    return made.max_difference


def distance_of(model: Any, layout: Layout, batch_class: type[RaggedBatch]) -> float:
    return distance(BatchedExecutor(model, layout, BLOCK, batch_class), model)


@pytest.mark.parametrize(
    ("kind", "bits"), [(kind, 8 if i % 2 else 4) for i, kind in enumerate(KINDS)]
)
def test_every_kind_gives_mlx_lms_logits_with_the_executor_chosen_for_it(
    tiny_model: Callable[..., Path], kind: Kind, bits: int
) -> None:
    model, precision = load(tiny_model(kind)), Precision(bits)
    executor, _, whole = choose_executor(model, VOCAB_SIZE, BLOCK, precision)
    assert isinstance(executor, BatchedExecutor) and not whole
    assert distance(executor, model) < TOLERANCE


@pytest.mark.parametrize(
    ("kind", "batch_class", "dequantized", "bits"),
    [
        ("gpt_oss", HostBatch, True, 8),
        ("qwen3", GraphBatch, True, 8),
        ("gpt_oss", GPUBatch, True, 8),
        ("gemma3", GPUBatch, False, 4),
        ("gpt_oss", GraphBatch, False, 8),
        ("gemma3", GraphBatch, False, 4),
        ("gemma3", DenseBatch, True, 4),
        ("gpt_oss", DenseBatch, False, 8),
        ("gpt_oss", RowBatch, False, 8),
    ],
)
def test_every_storage_and_batch_class_gives_mlx_lms_logits(
    tiny_model: Callable[..., Path],
    kind: Kind,
    batch_class: type[RaggedBatch],
    dequantized: bool,
    bits: int,
) -> None:
    model = load(tiny_model(kind))
    layout = probe_layout(model).with_precision(Precision(bits), dequantized=dequantized)
    assert distance_of(model, layout, batch_class) < TOLERANCE


@pytest.mark.parametrize(("name", "bits"), [("deepseek_v3", 8), ("gemma2", 4)])
def test_latents_and_keys_under_softcaps_are_quantized(
    name: str, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    precision = Precision(bits)
    monkeypatch.setattr(device, "batch_classes", lambda *_: [GraphBatch])  # none knows softcaps
    model = build(name)
    executor, reason, _ = choose_executor(model, VOCAB_SIZE, BLOCK, precision)
    assert isinstance(executor, BatchedExecutor)
    assert executor.spec.kv_bits == bits and reason
    assert distance(executor, model) < TOLERANCE


class TestTheComparisonCatches:
    """Errors in what is stored, however little they change the logits."""

    def is_wrong(
        self, path: Path, batch_class: type[RaggedBatch] = HostBatch, dequantized: bool = True
    ) -> None:
        model = load(path)
        layout = probe_layout(model).with_precision(Precision(8), dequantized=dequantized)
        with pytest.raises(RoundingMismatch, match="that differ from mlx-lm's"):
            distance_of(model, layout, batch_class)

    def test_keys_and_values_that_are_not_rounded(self, llama: Path, wrap: Wrap) -> None:
        @wrap(host, "keep")
        def unrounded(keep: Any, *arrays_and_hows: Any) -> list[Kept]:
            rounded = keep(*arrays_and_hows)
            new = arrays_and_hows[:2]
            return [Kept(array, its.scales) for array, its in zip(new, rounded, strict=True)]

        self.is_wrong(llama)

    def test_codes_that_are_two_too_high(self, llama: Path, wrap: Wrap) -> None:
        @wrap(Place, "put")
        def raised(put: Any, place: Any, number: Any, array: Any) -> None:
            if number == 3:
                groups = array.reshape(*array.shape[:-1], -1, 16)
                step = (groups.max(-1) - groups.min(-1)) / 255
                first = mx.arange(array.shape[-1]) == 0
                array = array + mx.where(first, 2 * mx.repeat(step, 16, axis=-1), 0)
            put(place, number, array)

        self.is_wrong(llama, GraphBatch)

    def test_scales_of_another_row(self, llama: Path, wrap: Wrap) -> None:
        @wrap(slabs.Slab, "read")
        def rolled(read: Any, slab: Any, *args: Any) -> Any:
            kept = slab.scales
            slab.scales = [mx.roll(s, 1, axis=2) for s in kept]
            try:
                return read(slab, *args)
            finally:
                slab.scales = kept

        self.is_wrong(llama, GraphBatch, dequantized=False)

    def test_blocks_that_lose_their_scales(self, llama: Path, wrap: Wrap) -> None:
        @wrap(host_blocks, "give")
        def unscaled(give: Any, slab: Any, group: Any, rows: Any, start: Any, parts: Any) -> None:
            give(slab, group, rows, start, [parts[0], [np.ones_like(s) for s in parts[1]]])

        self.is_wrong(llama)

    def test_blocks_that_are_quantized_once_more(self, llama: Path, wrap: Wrap) -> None:
        @wrap(host_blocks, "give")
        def again(give: Any, slab: Any, group: Any, rows: Any, start: Any, parts: Any) -> None:
            how = group.kind.quantization
            pairs = [map(mx.array, pair) for pair in zip(*parts, strict=True)]
            twice = [quantize(dequantize(Quantized(*pair), how), how) for pair in pairs]
            parts = [list(map(np.asarray, part)) for part in zip(*twice, strict=True)]
            give(slab, group, rows, start, parts)

        self.is_wrong(llama)


# -- what blocks hold ----------------------------------------------------------------


class Store(PlanRunner):
    """Drives an executor to store, save and restore, without sampling."""

    def __init__(
        self,
        model: Any,
        batch_class: type[RaggedBatch] = HostBatch,
        dequantized: bool = True,
        bits: int = 8,
    ) -> None:
        layout = probe_layout(model).with_precision(Precision(bits), dequantized=dequantized)
        executor = BatchedExecutor(model, layout, BLOCK, batch_class)
        super().__init__(executor, SlabSpec(0, 3, 128), SlabSpec(1, 1, 128))
        self.block = 0

    def compute(self, row: int, tokens: tuple[int, ...], *pieces: int) -> None:
        start = 0
        for end in (*pieces, len(tokens)):
            self.run(chunks=(Chunk(Slot(0, row), start, tokens[start:end]),))
            start = end

    def saved(self, slot: Slot, count: int) -> list[tuple[bytes, ...]]:
        """The bytes of the first ``count`` blocks of what lies in ``slot``."""
        blocks = tuple(range(self.block, self.block + count))
        self.block += count
        self.run(saves=(Save(slot, 0, blocks),))
        exported = self.run(evictions=tuple(Evict(b, export=True) for b in blocks)).exported
        return [tuple(bytes(part) for part in one.payload) for one in exported]

    def restore(self, payloads: Sequence[tuple[bytes, ...]], *slots: Slot) -> None:
        blocks = tuple(range(self.block, self.block + len(payloads)))
        self.block += len(payloads)
        inserts = tuple(Insert(b, p) for b, p in zip(blocks, payloads, strict=True))
        self.run(inserts=inserts, restores=tuple(Restore(slot, 0, blocks) for slot in slots))


WAYS = [
    (HostBatch, True, 8),
    (HostBatch, True, 4),
    (GraphBatch, True, 8),
    (GPUBatch, True, 8),
    (GraphBatch, False, 8),
    (GraphBatch, False, 4),
]
TOKENS = tuple(range(20, 20 + 3 * BLOCK))


@pytest.mark.parametrize(("batch_class", "dequantized", "bits"), WAYS)
def test_a_block_has_the_same_bytes_after_restores_moves_and_copies(
    tiny_model: Callable[..., Path],
    batch_class: type[RaggedBatch],
    dequantized: bool,
    bits: int,
) -> None:
    """A block is saved, restored from bytes in two other slots, moved to another slab, copied
    in parts to another slot, and saved each time. Its bytes stay the same, since nothing is
    quantized twice."""
    store = Store(load(tiny_model("gemma3")), batch_class, dequantized, bits)
    store.compute(0, TOKENS)
    first = store.saved(Slot(0, 0), 3)
    assert len(set(first)) == 3
    store.restore(first, Slot(0, 2), Slot(0, 1))
    for row in (1, 2):
        assert store.saved(Slot(0, row), 3) == first
    store.run(moves=(Move(Slot(0, 2), Slot(1, 0), len(TOKENS)),))
    assert store.saved(Slot(1, 0), 3) == first
    store.compute(1, TOKENS[::-1])  # nothing of what is copied is there
    store.restore(first[:1], Slot(0, 1))
    for start, end in ((BLOCK, BLOCK + 7), (BLOCK + 7, 3 * BLOCK)):
        store.run(copies=(CopyPositions(Slot(1, 0), Slot(0, 1), start, end),))
    assert store.saved(Slot(0, 1), 3) == first


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_a_slot_in_16_bits_is_the_same_after_a_restore(llama: Path, dtype: mx.Dtype) -> None:
    """Its values do not tell which codes they were made of, and any that give them will do."""
    model = mlx_lm.load(str(llama))[0]
    model.set_dtype(dtype)
    store = Store(model, GPUBatch)
    store.compute(0, TOKENS, 20)
    store.restore(store.saved(Slot(0, 0), 3), Slot(0, 2))
    whole, again = (store.executor.read_slot(Slot(0, row), len(TOKENS)) for row in (0, 2))
    for ours, theirs in zip(whole, again, strict=True):
        assert ours.array.dtype == dtype and mx.array_equal(ours.array, theirs.array)
        assert mx.any(ours.array != 0)


@pytest.mark.parametrize(
    ("kind", "length"), [("llama", 7), ("qwen3", 100), ("gemma3", 7), ("gemma3", 100)]
)
def test_slots_keep_dequantized_values_for_chunks_of_any_length(
    tiny_model: Callable[..., Path], kind: Kind, length: int
) -> None:
    """Arrays come to the slots in every memory order."""
    model = load(tiny_model(kind))
    ours = device.batch_classes(model, probe_layout(model))
    classes: list[type[RaggedBatch]] = [*ours, DenseBatch]
    for batch_class in classes:
        store = Store(model, batch_class)
        store.compute(0, tuple(range(5, 5 + length)))
        store.run(decodes=(Decode(Slot(0, 0), length, 7, 0, GREEDY),))
        stored = store.executor.read_slot(Slot(0, 0), length + 1)
        for kept, kind_of_array in zip(stored, store.executor.layout.arrays, strict=True):
            how = kind_of_array.quantization
            assert how is not None and kept.scales is not None
            assert mx.all(mx.max(mx.abs(kept.array), axis=-1) > 0)
            codes = codes_of(kept.array, kept.scales, how)
            assert mx.array_equal(kept.array, dequantize(Quantized(codes, kept.scales), how))


@pytest.mark.parametrize("other", [way[:2] for way in WAYS[2:4]])
def test_blocks_are_the_same_bytes_however_slots_keep_them(
    llama: Path, other: tuple[type[RaggedBatch], bool]
) -> None:
    model = load(llama)
    store, another = Store(model), Store(model, *other)
    store.compute(0, TOKENS)
    blocks = store.saved(Slot(0, 0), 3)
    another.restore(blocks, Slot(0, 1))
    assert another.saved(Slot(0, 1), 3) == blocks


def test_blocks_do_not_depend_on_where_a_prompt_was_cut(tiny_model: Callable[..., Path]) -> None:
    """Except for single codes, which a different rounding in fp32 moved across a border."""
    store = Store(load(tiny_model("qwen3")))
    store.compute(0, TOKENS)
    store.compute(1, TOKENS, 5, 16, 17, 40)
    (one, two) = (store.saved(Slot(0, row), 3) for row in (0, 1))
    how, group = Quantization(8, 16), store.executor.layout.groups[0]

    def values(payload: tuple[bytes, ...]) -> tuple[mx.array, mx.array]:
        (codes, scales) = (
            mx.array(np.frombuffer(data, np.uint8)).view(dtype).reshape(shape)
            for data, (shape, dtype) in zip(payload, group.parts(BLOCK), strict=True)
        )
        return codes, dequantize(Quantized(unpack(codes, 8), scales), how)

    for a, b in zip(one, two, strict=True):
        (codes, read), (others, read_too) = values(a), values(b)
        assert mx.mean(codes != others) < 1e-3
        assert mx.max(mx.abs(read - read_too)) <= 0.02 * mx.max(mx.abs(read))


# -- bytes, and what is not quantized -------------------------------------------------


@pytest.mark.parametrize(
    ("bits", "dequantized"), [(16, True), (8, True), (8, False), (4, True), (4, False)]
)
def test_slabs_and_blocks_take_the_bytes_of_the_layout(
    tiny_model: Callable[..., Path], bits: int, dequantized: bool
) -> None:
    model = load(tiny_model("gpt_oss"))
    layout = probe_layout(model).with_precision(Precision(bits), dequantized=dequantized)
    slab = slabs.Slab(layout, 3, 64)
    kept = sum(array.nbytes for array in slab.contents) - slab.last_tokens.nbytes
    assert kept == 3 * 64 * layout.slot_token_bytes
    store = Store(model, GraphBatch, dequantized, bits)
    store.compute(0, TOKENS)
    (block, *_) = store.saved(Slot(0, 0), 3)
    assert sum(map(len, block)) == BLOCK * layout.block_token_bytes


def test_heads_that_no_group_divides_stay_in_16_bits_and_are_reported(tmp_path: Path) -> None:
    model = load(make_tiny("llama", tmp_path, head_dim=24))
    executor, _, whole = choose_executor(model, VOCAB_SIZE, BLOCK, Precision(8))
    assert executor.spec.kv_bits == 16
    assert whole == "2 of 2 layers: no group of 16 elements or more divides heads of 24"


def test_models_that_slots_cannot_hold_stay_in_16_bits() -> None:
    executor, _, whole = choose_executor(build("deepseek_v41"), VOCAB_SIZE, BLOCK, Precision(8))
    assert isinstance(executor, SerialExecutor) and executor.spec.kv_bits == 16
    assert whole == "mlx-lm's own caches"


def test_a_model_that_fails_the_quantized_proof_runs_in_16_bits(llama: Path, wrap: Wrap) -> None:
    @wrap(choosing, "prove")
    def picky(prove: Any, model: Any, layout: Any, *rest: Any) -> None:
        if layout.kv_bits < 16:
            raise NotBatchable("its logits are wrong")
        prove(model, layout, *rest)

    executor, reason, whole = choose_executor(load(llama), VOCAB_SIZE, BLOCK, Precision(8))
    assert (executor.spec.kv_bits, reason, whole) == (16, "", "any layer: its logits are wrong")
    assert trial.BLOCK_SIZE == BLOCK
