"""The executors against mlx-lm's own caches, on tiny random models, by logits or tokens."""

import gc
import weakref
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors

from engine.batch import ragged
from engine.batch.cpu.decoder import DecoderBatch, bind
from engine.batch.cpu.host import HostBatch
from engine.batch.gpu import GPUBatch
from engine.batch.graph import GraphBatch
from engine.cache.layout import AttentionLayout, Layout, UnsupportedLayout, probe_layout
from engine.cache.slabs import Slab
from engine.executor.base import PendingStep
from engine.executor.batched import BatchedExecutor
from engine.executor.serial import SerialExecutor, measured_token_bytes
from engine.plan import (
    Chunk,
    Decode,
    Evict,
    Insert,
    Move,
    Plan,
    ResizeSlab,
    Restore,
    Save,
    SlabSpec,
    Slot,
    StepResult,
)
from engine.proving.proof import NotBatchable, proof_references
from engine.proving.proof import prove as prove_with
from engine.zoo.build import build
from shared.wire import SamplingParams, TokenLogprobs
from tests.tiny_models import VOCAB_SIZE, Kind, make_tiny

GREEDY = SamplingParams(seed=1)
BLOCK = 16
_alone: dict[tuple[int, ...], list[int]] = {}
NO_TOKEN: Any = "x"  # MLX raises where it is computed


@pytest.fixture(scope="module", params=["llama", "gemma3", "gpt_oss"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(autouse=True, params=[GraphBatch, GPUBatch, HostBatch, DecoderBatch])
def batch_class(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> type[ragged.RaggedBatch]:
    monkeypatch.setattr(Runner, "batch_class", request.param, raising=False)
    return request.param


def load(kind: Kind, path: Path) -> Any:
    ragged.install()
    _alone.clear()  # a new model may have the id of one that is gone
    make_tiny(kind, path, seed=1)
    return mlx_lm.load(str(path))[0]


def prompt(seed: int, length: int) -> list[int]:
    return mx.random.randint(3, VOCAB_SIZE, (length,), key=mx.random.key(seed)).tolist()


def alone(model: Any, tokens: list[int], count: int) -> list[int]:
    """Return mlx-lm's tokens, computed once for all kinds of batches."""
    key = id(model), count, *tokens
    if key not in _alone:
        _alone[key] = _computed_alone(model, tokens, count)
    return _alone[key]


def _computed_alone(model: Any, tokens: list[int], count: int) -> list[int]:
    cache = make_prompt_cache(model)
    out: list[int] = []
    if len(tokens) > 1:
        model(mx.array([tokens[:-1]]), cache=cache)
    last = tokens[-1]
    for _ in range(count):
        last = int(mx.argmax(model(mx.array([[last]]), cache=cache)[0, -1]))
        out.append(last)
    return out


PENALIZED = SamplingParams(
    seed=1,
    repetition_penalty=1.4,
    repetition_context_size=9,
    presence_penalty=0.3,
    frequency_penalty=0.2,
    logit_bias=[(40, 1.5), (41, -2.0)],
)


def penalized(model: Any, tokens: list[int], count: int) -> list[int]:
    """Return the tokens of `alone` with mlx-lm's logits processors."""
    repetition = make_logits_processors({40: 1.5, 41: -2.0}, 1.4, 9)
    generated = make_logits_processors(None, None, None, 0.3, 1000, 0.2, 1000)
    cache = make_prompt_cache(model)
    model(mx.array([tokens[:-1]]), cache=cache)
    out: list[int] = []
    for _ in range(count):
        logits = model(mx.array([[(tokens + out)[-1]]]), cache=cache)[:, -1]
        for process in repetition:
            logits = process(mx.array(tokens + out), logits)
        for process in generated if out else ():
            logits = process(mx.array(out), logits)
        out.append(int(mx.argmax(logits[0])))
    return out


def direct_logprobs(model: Any, tokens: list[int]) -> mx.array:
    """Return log-probabilities (len(tokens), vocab) of the token after each of ``tokens``."""
    logits = model(mx.array([tokens]), cache=make_prompt_cache(model))[0]
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def assert_logprobs(ours: TokenLogprobs, direct: mx.array, chosen: int) -> None:
    assert ours.chosen == pytest.approx(direct[chosen].item(), abs=2e-4)
    best = mx.sort(-direct)[: len(ours.top)].tolist()
    assert ours.top == pytest.approx([-value for value in best], abs=2e-4)
    assert ours.top == pytest.approx([direct[i].item() for i in ours.top_ids], abs=2e-4)


class Runner:
    """Drives an executor with plans made by hand, without a scheduler."""

    batch_class: type[ragged.RaggedBatch]

    def __init__(self, model: Any, rows: int = 4, capacity: int = 128) -> None:
        layout = probe_layout(model)
        batch_class = bound(model, layout, self.batch_class)
        self.executor = BatchedExecutor(model, layout, BLOCK, batch_class)
        self.step = 0
        self.run(new_slabs=(SlabSpec(0, rows, capacity),))

    def run(self, **parts: Any) -> StepResult:
        self.step += 1
        return self.executor.dispatch(Plan(step=self.step, **parts)).read()

    def prefill(self, slot: Slot, tokens: list[int], start: int = 0) -> None:
        self.run(chunks=(Chunk(slot, start, tuple(tokens)),))

    def decode(self, *inputs: tuple[Slot, int, int | None, int]) -> tuple[int, ...]:
        return self.run(decodes=tuple(Decode(*each, GREEDY) for each in inputs)).tokens

    def generate(self, slot: Slot, tokens: list[int], count: int, known: bool) -> list[int]:
        out: list[int] = []
        for index in range(count):
            token = tokens[-1] if index == 0 else out[-1] if known else None
            out += self.decode((slot, len(tokens) - 1 + index, token, index))
        return out


def bound(
    model: Any, layout: Layout, batch_class: type[ragged.RaggedBatch]
) -> type[ragged.RaggedBatch]:
    if batch_class is not DecoderBatch:
        return batch_class
    return bind(model, layout) or pytest.skip("not of this family")


@pytest.fixture
def through_views(batch_class: type[ragged.RaggedBatch]) -> None:
    """Skip tests that break the views of MLX's layers if no such layer runs."""
    if batch_class is DecoderBatch:
        pytest.skip("no layer of MLX runs; see batch/cpu/test_decoder.py")


def prove(model: Any, batch_class: type[ragged.RaggedBatch]) -> None:
    layout = probe_layout(model)
    batch_class = bound(model, layout, batch_class)
    prove_with(model, layout, batch_class, proof_references(model, layout, VOCAB_SIZE))


def test_the_proof_accepts_models_of_plain_and_sliding_layers(
    model: Any, batch_class: type[ragged.RaggedBatch]
) -> None:
    prove(model, batch_class)


@pytest.mark.usefixtures("through_views")
def test_the_proof_notices_a_wrong_position(
    model: Any, batch_class: type[ragged.RaggedBatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    view_of = ragged.RaggedBatch.kv_view

    def moved(batch: ragged.RaggedBatch, number: int, layer: AttentionLayout) -> Any:
        view = view_of(batch, number, layer)
        view.offset = view.offset * 2
        return view

    monkeypatch.setattr(ragged.RaggedBatch, "kv_view", moved)
    with pytest.raises(NotBatchable):
        prove(model, batch_class)


def test_the_proof_notices_a_shifted_mask(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = probe_layout(model)
    references = proof_references(model, layout, VOCAB_SIZE)  # mlx-lm's, with the right masks
    attend = mx.fast.scaled_dot_product_attention

    def shifted(*args: Any, mask: Any, **fields: Any) -> mx.array:
        mask = mx.roll(mask, 1, axis=-1) if isinstance(mask, mx.array) else mask
        return attend(*args, mask=mask, **fields)

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", shifted)
    with pytest.raises(NotBatchable, match="logits differ"):
        prove_with(model, layout, GraphBatch, references)


@pytest.mark.usefixtures("through_views")
def test_the_proof_notices_a_stale_row(
    model: Any, batch_class: type[ragged.RaggedBatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    write = batch_class.write

    def late(batch: Any, layer: Any, keys: mx.array, values: mx.array) -> None:
        write(batch, layer, mx.roll(keys, 1, axis=0), values)

    monkeypatch.setattr(batch_class, "write", late)
    with pytest.raises(NotBatchable):
        prove(model, batch_class)


def test_slots_do_not_hold_state_that_grows() -> None:
    with pytest.raises(UnsupportedLayout, match="layer 0 keeps growing state"):
        probe_layout(build("longcat_flash_ngram"))


def test_uneven_rows_that_join_and_leave_give_the_tokens_that_they_give_alone(model: Any) -> None:
    prompts = [prompt(i, n) for i, n in enumerate((50, 3, 17, 1, 33))]
    expected = [alone(model, tokens, 12) for tokens in prompts]
    runner = Runner(model)
    runner.run(new_slabs=(SlabSpec(1, 1, 64),))
    slots = [Slot(0, 2), Slot(1, 0), Slot(0, 0), Slot(0, 3), Slot(0, 1)]
    outputs: list[list[int]] = [[] for _ in prompts]
    for turn in range(21):
        joined = [i for i in range(5) if turn == 2 * i]
        chunks = [Chunk(slots[i], 0, tuple(prompts[i][:-1])) for i in joined if prompts[i][1:]]
        running = [i for i in range(5) if 2 * i < turn <= 2 * i + 12]
        decodes = [
            Decode(
                slots[i],
                len(prompts[i]) - 1 + len(outputs[i]),
                None if outputs[i] else prompts[i][-1],
                len(outputs[i]),
                GREEDY,
            )
            for i in reversed(running)
        ]
        result = runner.run(chunks=tuple(chunks), decodes=tuple(decodes))
        for i, token in zip(reversed(running), result.tokens, strict=True):
            outputs[i].append(token)
    assert outputs == [e[: len(o)] for e, o in zip(expected, outputs, strict=True)]
    assert [len(o) for o in outputs] == [12] * 5


def test_a_rewound_row_leaves_other_rows_alone(model: Any) -> None:
    one, two = prompt(1, 40), prompt(2, 25)
    runner = Runner(model)
    a, b = Slot(0, 1), Slot(0, 2)
    runner.prefill(a, one[:-1])
    runner.prefill(b, two[:-1])
    first = runner.generate(a, one, 6, known=True)
    runner.generate(b, two, 3, known=True)
    assert runner.generate(a, one, 6, known=True) == first == alone(model, one, 6)
    assert runner.generate(b, two, 3, known=False) == alone(model, two, 3)


def test_blocks_restore_a_prefix_in_another_slot_even_from_bytes(model: Any) -> None:
    tokens = prompt(3, 60)
    expected = alone(model, tokens, 5)
    runner = Runner(model)
    runner.prefill(Slot(0, 0), tokens[:-1])
    saved = runner.run(saves=(Save(Slot(0, 0), 0, (1, 2)), Save(Slot(0, 0), 32, (3,))))
    assert saved.exported == ()
    exported = runner.run(evictions=(Evict(1, export=True), Evict(2)), exports=(3,)).exported
    assert [e.block_id for e in exported] == [1, 3]
    copies = {e.block_id: tuple(bytes(part) for part in e.payload) for e in exported}
    runner.prefill(Slot(0, 0), prompt(4, 60))  # what was saved does not follow the slot
    runner.run(
        inserts=(Insert(11, copies[1]), Insert(13, copies[3])),
        restores=(Restore(Slot(0, 3), 0, (11,)), Restore(Slot(0, 3), 32, (13,))),
    )
    runner.prefill(Slot(0, 3), tokens[16:32], start=16)
    runner.prefill(Slot(0, 3), tokens[48:-1], start=48)
    assert runner.generate(Slot(0, 3), tokens, 5, known=True) == expected


def test_a_moved_sequence_continues_with_its_last_sampled_token(model: Any) -> None:
    tokens = prompt(5, 30)
    runner = Runner(model)
    runner.prefill(Slot(0, 1), tokens[:-1])
    out = runner.generate(Slot(0, 1), tokens, 4, known=False)
    moves = (Move(Slot(0, 1), Slot(1, 0), len(tokens) + 3),)
    runner.run(new_slabs=(SlabSpec(1, 2, 256),), moves=moves)
    out += runner.decode((Slot(1, 0), len(tokens) + 3, None, 4))
    assert out == alone(model, tokens, 5)


def test_penalties_see_tokens_that_the_host_does_not_know_yet(model: Any) -> None:
    """Tokens stay on the device. One row moves, the other joins late."""
    one, two = prompt(11, 30), prompt(12, 12)
    runner = Runner(model)
    runner.run(new_slabs=(SlabSpec(1, 2, 256),))
    runner.prefill(Slot(0, 2), one[:-1])
    runner.prefill(Slot(0, 1), two[:-1])
    slots = [Slot(0, 2), Slot(0, 1)]
    outputs: tuple[list[int], list[int]] = ([], [])
    for turn in range(12):
        moves: tuple[Move, ...] = ()
        if turn == 6:
            moves = (Move(slots[0], Slot(1, 1), len(one) - 1 + turn),)
            slots[0] = Slot(1, 1)
        decodes = []
        for tokens, slot, out in ((one, slots[0], outputs[0]), (two, slots[1], outputs[1])):
            if tokens is two and turn < 3:
                continue
            first = not out
            decodes.append(
                Decode(
                    slot,
                    len(tokens) - 1 + len(out),
                    tokens[-1] if first else None,
                    len(out),
                    PENALIZED,
                    history=tuple(tokens[:-1]) if first else None,
                )
            )
        result = runner.run(moves=moves, decodes=tuple(decodes))
        for out, token in zip(outputs, result.tokens, strict=False):
            out.append(token)
    assert outputs[0] == penalized(model, one, 12) != alone(model, one, 12)
    assert outputs[1] == penalized(model, two, 9)


def test_logprobs_come_in_the_order_of_the_plan(model: Any) -> None:
    prompts = [prompt(i, n) for i, n in ((21, 20), (22, 9), (23, 14))]
    runner = Runner(model)
    slots = [Slot(0, 2), Slot(0, 0), Slot(0, 1)]
    for slot, tokens in zip(slots, prompts, strict=True):
        runner.prefill(slot, tokens[:-1])
    result = runner.run(
        decodes=tuple(
            Decode(slot, len(tokens) - 1, tokens[-1], 0, GREEDY, logprobs=count)
            for slot, tokens, count in zip(slots, prompts, (3, None, 0), strict=True)
        )
    )
    assert result.tokens == tuple(alone(model, tokens, 1)[0] for tokens in prompts)
    first, second, third = result.logprobs
    assert first is not None and second is None and third is not None
    assert len(first.top) == 3 and third.top == ()
    for ours, tokens, token in ((first, prompts[0], 0), (third, prompts[2], 2)):
        assert_logprobs(ours, direct_logprobs(model, tokens)[-1], result.tokens[token])


def test_logprobs_of_a_prompt_come_with_its_chunks(model: Any) -> None:
    tokens, other = prompt(31, 40), prompt(32, 25)
    runner = Runner(model)
    direct = direct_logprobs(model, tokens)
    found: list[TokenLogprobs] = []
    for start, end in ((0, 16), (16, 39)):
        result = runner.run(
            chunks=(
                Chunk(Slot(0, 0), start, tuple(other[start : start + 9])),
                Chunk(
                    Slot(0, 1),
                    start,
                    tuple(tokens[start:end]),
                    tuple(tokens[start + 1 : end + 1]),
                    2,
                ),
            )
        )
        (scored,) = result.prompt_logprobs
        assert scored[:2] == (Slot(0, 1), start)
        found += scored.logprobs
    assert len(found) == 39
    for position, ours in enumerate(found):
        assert len(ours.top) == 2
        assert_logprobs(ours, direct[position], tokens[position + 1])
    assert runner.generate(Slot(0, 1), tokens, 3, known=True) == alone(model, tokens, 3)


def test_a_scored_chunk_that_raises_fails_alone(model: Any) -> None:
    tokens = prompt(33, 20)
    runner = Runner(model)
    result = runner.run(
        chunks=(
            Chunk(Slot(0, 0), 0, (*tokens, NO_TOKEN), tuple(tokens), 1),
            Chunk(Slot(0, 1), 0, tuple(tokens[:-1]), tuple(tokens[1:]), 1),
        )
    )
    assert [slot for slot, _ in result.failed] == [Slot(0, 0)]
    assert [(one.slot, len(one.logprobs)) for one in result.prompt_logprobs] == [(Slot(0, 1), 19)]


def test_a_chunk_that_raises_fails_alone(model: Any) -> None:
    good, bad = prompt(6, 20), [*prompt(7, 20), NO_TOKEN]
    runner = Runner(model)
    result = runner.run(
        chunks=(Chunk(Slot(0, 0), 0, tuple(bad)), Chunk(Slot(0, 1), 0, tuple(good[:-1]))),
        saves=(Save(Slot(0, 0), 0, (1,)), Save(Slot(0, 1), 0, (2,))),
        exports=(2,),
    )
    assert [slot for slot, _ in result.failed] == [Slot(0, 0)]
    assert [e.block_id for e in result.exported] == [2]
    assert runner.generate(Slot(0, 1), good, 3, known=True) == alone(model, good, 3)


def test_a_block_that_was_not_saved_fails_only_the_slots_that_restore_it(
    model: Any,
) -> None:
    runner = Runner(model)
    slots = [Slot(0, row) for row in range(3)]
    bad, good = (*prompt(7, 20), NO_TOKEN), tuple(prompt(8, 20))
    result = runner.run(
        chunks=(Chunk(slots[0], 0, bad),), saves=(Save(slots[0], 0, (1,)),), exports=(1,)
    )
    assert result.exported == ()
    result = runner.run(
        restores=(Restore(slots[1], 0, (1,)),),
        chunks=(Chunk(slots[1], 16, good), Chunk(slots[2], 0, good)),
        saves=(Save(slots[1], 16, (2,)), Save(slots[2], 0, (3,))),
        exports=(2, 3),
    )
    assert [slot for slot, _ in result.failed] == [slots[1]]
    assert [e.block_id for e in result.exported] == [3]
    assert runner.run(evictions=(Evict(1, export=True), Evict(2))).exported == ()


def test_slots_keep_their_sequences_while_their_slab_grows_and_shrinks(model: Any) -> None:
    """With look-ahead: each plan is dispatched before the one before it is read."""
    prompts = [prompt(i, n) for i, n in enumerate((40, 9, 23, 30), 50)]
    runner = Runner(model, rows=2)
    outputs: list[list[int]] = [[] for _ in prompts]
    resized = {3: 3, 6: 9, 7: 4}  # rows after a turn
    pending: list[tuple[PendingStep, list[int]]] = []
    for turn in range(14):
        runner.step += 1
        running = [i for i in range(4) if 2 * i < turn]
        joining = [i for i in range(4) if 2 * i == turn]
        rows = (ResizeSlab(0, resized[turn]),) if turn in resized else ()
        decodes = [
            Decode(
                Slot(0, i),
                len(prompts[i]) - 2 + turn - 2 * i,
                None if turn - 2 * i > 1 else prompts[i][-1],
                turn - 2 * i - 1,
                GREEDY,
            )
            for i in running
        ]
        chunks = [Chunk(Slot(0, i), 0, tuple(prompts[i][:-1])) for i in joining]
        plan = Plan(
            step=runner.step, resized_slabs=rows, decodes=tuple(decodes), chunks=tuple(chunks)
        )
        pending.append((runner.executor.dispatch(plan), running))
        if len(pending) > 1 or turn == 13:
            step, members = pending.pop(0)
            for i, token in zip(members, step.read().tokens, strict=True):
                outputs[i].append(token)
    assert outputs == [
        alone(model, tokens, len(out)) for tokens, out in zip(prompts, outputs, strict=True)
    ]
    assert [len(out) for out in outputs] == [12, 10, 8, 6]


@pytest.mark.parametrize("rows", [9, 3])
def test_resizing_a_slab_takes_no_more_than_one_array(model: Any, rows: int) -> None:
    layout = probe_layout(model)
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


@pytest.mark.parametrize(
    ("sampling", "logprobs"),
    [(GREEDY, None), (SamplingParams(seed=1, temperature=0.9, top_p=0.9), 5)],
)
def test_steps_write_slabs_in_place(
    model: Any, sampling: SamplingParams, logprobs: int | None
) -> None:
    """The slab has 64 MB, so a copy of one of its arrays would show in the peak."""
    layout = probe_layout(model)
    capacity = (64 << 20) // (8 * layout.slot_token_bytes)
    runner = Runner(model, rows=8, capacity=capacity)
    slots = [Slot(0, row) for row in range(8)]
    array_bytes = max(array.nbytes for array in Slab(layout, 8, capacity).arrays)

    def steps(first: int) -> None:
        pending: PendingStep | None = None
        for index in range(first, first + 6):
            runner.step += 1
            plan = Plan(
                step=runner.step,
                decodes=tuple(
                    Decode(s, 40 + index, None if index else 5, index, sampling, logprobs=logprobs)
                    for s in slots
                ),
                chunks=(Chunk(slots[0], 0, (5,) * 30),),
                saves=(Save(slots[1], 0, (100 + index,)),),
            )
            dispatched = runner.executor.dispatch(plan)
            if pending is not None:
                pending.read()
            pending = dispatched
        assert pending is not None
        pending.read()

    steps(0)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    steps(6)
    assert mx.get_peak_memory() - before < array_bytes / 2


def test_a_freed_slab_is_released_without_the_garbage_collector(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    slabs: list[weakref.ref[Slab]] = []
    allocate = Slab.__init__

    def noted(slab: Slab, *args: Any) -> None:
        allocate(slab, *args)
        slabs.append(weakref.ref(slab))

    monkeypatch.setattr(Slab, "__init__", noted)
    runner = Runner(model)
    (slab,) = slabs
    gc.collect()
    gc.disable()
    try:
        runner.prefill(Slot(0, 0), prompt(1, 20))
        runner.decode((Slot(0, 0), 20, 5, 0), (Slot(0, 1), 0, 5, 0))
        assert slab() is not None
        runner.run(freed_slabs=(0,))
        assert slab() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", ["mamba", "llama"])
def test_the_serial_executor_gives_the_tokens_of_mlx_lm(kind: Kind, tmp_path: Path) -> None:
    model = load(kind, tmp_path)
    executor = SerialExecutor(model, measured_token_bytes(model))
    for number, length in enumerate((30, 1, 12)):
        tokens = prompt(number, length)
        slot = Slot(number, 0)
        out: list[int] = []
        if length > 1:
            chunks = (Chunk(slot, 0, tuple(tokens[:5])), Chunk(slot, 5, tuple(tokens[5:-1])))
            executor.dispatch(
                Plan(step=1, new_slabs=(SlabSpec(number, 1, 64),), chunks=chunks)
            ).read()
        for index in range(5):
            token = out[-1] if out else tokens[-1]
            decode = Decode(slot, length - 1 + index, token, index, GREEDY)
            out += executor.dispatch(Plan(step=2, decodes=(decode,))).read().tokens
        executor.dispatch(Plan(step=3, freed_slabs=(number,))).read()
        assert out == alone(model, tokens, 5)


@pytest.mark.parametrize("kind", ["mamba", "llama"])
def test_the_serial_executor_applies_the_same_controls(kind: Kind, tmp_path: Path) -> None:
    model = load(kind, tmp_path)
    executor = SerialExecutor(model, measured_token_bytes(model))
    tokens, slot = prompt(41, 30), Slot(0, 0)
    out: list[int] = []
    chunks = (
        Chunk(slot, 0, tuple(tokens[:12]), tuple(tokens[1:13]), 1),
        Chunk(slot, 12, tuple(tokens[12:-1]), tuple(tokens[13:]), 1),
    )
    result = executor.dispatch(Plan(step=1, new_slabs=(SlabSpec(0, 1, 64),), chunks=chunks)).read()
    assert not result.prompt_logprobs  # the chunks wait until a piece of mlx-lm is full
    prompts: list[TokenLogprobs | None] = []
    for index in range(6):
        known = tokens + out
        decode = Decode(
            slot,
            len(known) - 1,
            known[-1],
            index,
            PENALIZED,
            logprobs=3,
            history=None if index else tuple(known[:-1]),
        )
        result = executor.dispatch(Plan(step=2, decodes=(decode,))).read()
        out += result.tokens
        prompts += [score for one in result.prompt_logprobs for score in one.logprobs]
        prompts += result.logprobs
    assert out == penalized(model, tokens, 6)
    direct = direct_logprobs(model, tokens + out)
    for position, ours in enumerate(prompts):
        assert ours is not None
        assert_logprobs(ours, direct[position], (tokens + out)[position + 1])
