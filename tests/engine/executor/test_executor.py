"""The executors against mlx-lm's own caches, on tiny random models, by logits or tokens."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from engine.cache.layout import probe_layout
from engine.cache.slabs import Slab
from engine.executor.base import PendingStep
from engine.plan import (
    Chunk,
    CopyPositions,
    Evict,
    Insert,
    Move,
    ResizeSlab,
    Restore,
    Save,
    SlabSpec,
    Slot,
)
from shared.wire import SamplingParams, TokenLogprobs
from tests.engine.conftest import Wrap
from tests.engine.executor.by_hand import (
    GREEDY,
    PENALIZED,
    Runner,
    alone,
    assert_logprobs,
    chunk,
    direct_logprobs,
    next_decode,
    penalized,
    prompt,
)
from tests.engine.executor.conftest import every_pair

NO_TOKEN: Any = "x"  # MLX raises where it is computed
pytestmark = pytest.mark.usefixtures("batch_class")


@every_pair
def test_uneven_rows_that_join_and_leave_give_the_tokens_that_they_give_alone(model: Any) -> None:
    prompts = [prompt(i, n) for i, n in enumerate((50, 3, 17, 1, 33))]
    expected = [alone(model, tokens, 12) for tokens in prompts]
    runner = Runner(model)
    runner.run(new_slabs=(SlabSpec(1, 1, 64),))
    slots = [2, Slot(1, 0), 0, 3, 1]
    outputs: list[list[int]] = [[] for _ in prompts]
    for turn in range(21):
        joined = [i for i in range(5) if turn == 2 * i]
        chunks = [chunk(slots[i], prompts[i]) for i in joined if prompts[i][1:]]
        running = [i for i in reversed(range(5)) if 2 * i < turn <= 2 * i + 12]
        decodes = [next_decode(slots[i], prompts[i], len(outputs[i])) for i in running]
        result = runner.run(chunks=tuple(chunks), decodes=tuple(decodes))
        for i, token in zip(running, result.tokens, strict=True):
            outputs[i].append(token)
    assert outputs == expected


def test_blocks_restore_a_prefix_in_another_slot_even_from_bytes(model: Any) -> None:
    tokens = prompt(3, 60)
    expected = alone(model, tokens, 5)
    runner = Runner(model)
    runner.prefill(0, tokens[:-1])
    saved = runner.run(saves=(Save(0, 0, (1, 2)), Save(0, 32, (3,))))
    assert saved.exported == ()
    exported = runner.run(evictions=(Evict(1, export=True), Evict(2)), exports=(3,)).exported
    assert [e.block_id for e in exported] == [1, 3]
    copies = {e.block_id: tuple(bytes(part) for part in e.payload) for e in exported}
    runner.prefill(0, prompt(4, 60))  # what was saved does not follow the slot
    runner.run(
        inserts=(Insert(11, copies[1]), Insert(13, copies[3])),
        restores=(Restore(3, 0, (11,)), Restore(3, 32, (13,))),
    )
    runner.prefill(3, tokens[16:32], start=16)
    runner.prefill(3, tokens[48:-1], start=48)
    assert runner.generate(3, tokens, 5, known=True) == expected


def test_penalties_see_tokens_that_the_host_does_not_know_yet(model: Any) -> None:
    """Tokens stay on the device. One row moves to another slab, the other joins late."""
    one, two = prompt(11, 30), prompt(12, 12)
    runner = Runner(model)
    runner.run(new_slabs=(SlabSpec(1, 2, 256),))
    runner.prefill(2, one[:-1])
    runner.prefill(1, two[:-1])
    slots = [2, 1]
    outputs: tuple[list[int], list[int]] = ([], [])
    for turn in range(12):
        moves: tuple[Move, ...] = ()
        if turn == 6:
            moves = (Move(slots[0], Slot(1, 1), len(one) - 1 + turn),)
            slots[0] = Slot(1, 1)
        decodes = []
        for tokens, slot, out in ((one, slots[0], outputs[0]), (two, slots[1], outputs[1])):
            if tokens is one or turn >= 3:
                history = None if out else tuple(tokens[:-1])
                decodes.append(next_decode(slot, tokens, len(out), PENALIZED, history=history))
        result = runner.run(moves=moves, decodes=tuple(decodes))
        for out, token in zip(outputs, result.tokens, strict=False):
            out.append(token)
    assert outputs[0] == penalized(model, one, 12) != alone(model, one, 12)
    assert outputs[1] == penalized(model, two, 9)


def test_logprobs_come_in_the_order_of_the_plan(model: Any) -> None:
    prompts = [prompt(i, n) for i, n in ((21, 20), (22, 9), (23, 14))]
    runner = Runner(model)
    slots = [2, 0, 1]
    for slot, tokens in zip(slots, prompts, strict=True):
        runner.prefill(slot, tokens[:-1])
    decodes = (
        next_decode(slot, tokens, 0, logprobs=count)
        for slot, tokens, count in zip(slots, prompts, (3, None, 0), strict=True)
    )
    result = runner.run(decodes=tuple(decodes))
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
        inputs, targets = tuple(tokens[start:end]), tuple(tokens[start + 1 : end + 1])
        plain = Chunk(0, start, tuple(other[start : start + 9]))
        result = runner.run(chunks=(plain, Chunk(1, start, inputs, targets, 2)))
        (scored,) = result.prompt_logprobs
        assert scored[:2] == (1, start)
        found += scored.logprobs
    assert len(found) == 39
    for position, ours in enumerate(found):
        assert len(ours.top) == 2
        assert_logprobs(ours, direct[position], tokens[position + 1])
    assert runner.generate(1, tokens, 3, known=True) == alone(model, tokens, 3)


@pytest.mark.parametrize("scored", [False, True], ids=["", "scored"])
def test_a_chunk_that_raises_fails_alone(model: Any, scored: bool) -> None:
    good, bad = prompt(6, 20), prompt(7, 20)
    targets = (tuple(bad), tuple(good[1:])) if scored else ((), ())
    runner = Runner(model)
    result = runner.run(
        chunks=(
            Chunk(0, 0, (*bad, NO_TOKEN), targets[0], 1),
            Chunk(1, 0, tuple(good[:-1]), targets[1], 1),
        ),
        saves=(Save(0, 0, (1,)), Save(1, 0, (2,))),
        exports=(2,),
    )
    assert [slot for slot, _ in result.failed] == [0]
    assert [e.block_id for e in result.exported] == [2]
    scores = [(one.slot, len(one.logprobs)) for one in result.prompt_logprobs]
    assert scores == [(1, 19)] * scored
    assert runner.generate(1, good, 3, known=True) == alone(model, good, 3)


def test_a_block_that_was_not_saved_fails_only_the_slots_that_restore_it(model: Any) -> None:
    runner = Runner(model)
    slots = [row for row in range(3)]
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
        running = [i for i in range(4) if 2 * i < turn]
        joining = [i for i in range(4) if 2 * i == turn]
        rows = (ResizeSlab(0, resized[turn]),) if turn in resized else ()
        decodes = tuple(next_decode(i, prompts[i], turn - 2 * i - 1) for i in running)
        chunks = tuple(chunk(i, prompts[i]) for i in joining)
        step = runner.dispatch(resized_slabs=rows, decodes=decodes, chunks=chunks)
        pending.append((step, running))
        if len(pending) > 1 or turn == 13:
            step, members = pending.pop(0)
            for i, token in zip(members, step.read().tokens, strict=True):
                outputs[i].append(token)
    assert outputs == [
        alone(model, tokens, len(out)) for tokens, out in zip(prompts, outputs, strict=True)
    ]
    assert [len(out) for out in outputs] == [12, 10, 8, 6]


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
    slots = [row for row in range(8)]
    array_bytes = max(array.nbytes for array in Slab(layout, 8, capacity).arrays)

    def steps(first: int) -> None:
        pending: list[PendingStep] = []
        for index in range(first, first + 6):
            decodes = (next_decode(s, [5] * 41, index, sampling, logprobs=logprobs) for s in slots)
            dispatched = runner.dispatch(
                decodes=tuple(decodes),
                chunks=(Chunk(slots[0], 0, (5,) * 30),),
                saves=(Save(slots[1], 0, (100 + index,)),),
            )
            for before in pending:
                before.read()
            pending = [dispatched]
        dispatched.read()

    steps(0)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    steps(6)
    assert mx.get_peak_memory() - before < array_bytes / 2


def test_moves_and_copies_of_one_plan_find_the_slab_free(model: Any, wrap: Wrap) -> None:
    """Work in flight refers to it, and it would be copied whole for each of them."""
    runner = Runner(model, rows=4, capacity=64)
    for row in range(2):
        runner.prefill(row, prompt(row, 20))
    found: list[bool] = []

    @wrap(Slab, "copy_row")
    @wrap(Slab, "copy_positions")
    def noted(copy: Callable[..., Any], *given: Any) -> Any:
        found.append(runner.executor._line.piece is None)
        return copy(*given)

    runner.run(
        new_slabs=(SlabSpec(1, 2, 128),),
        moves=tuple(Move(row, Slot(1, row), 19) for row in range(2)),
        copies=tuple(CopyPositions(Slot(1, 0), row, 0, 16) for row in range(2, 4)),
    )
    assert len(found) >= 2 and all(found)


def test_a_freed_slab_is_released_without_the_garbage_collector(model: Any, wrap: Wrap) -> None:
    slabs: list[weakref.ref[Slab]] = []

    @wrap(Slab, "__init__")
    def noted(allocate: Callable[..., None], slab: Slab, *args: Any, **how: Any) -> None:
        allocate(slab, *args, **how)
        slabs.append(weakref.ref(slab))

    runner = Runner(model)
    (slab,) = slabs
    gc.collect()
    gc.disable()
    try:
        runner.prefill(0, prompt(1, 20))
        runner.decode((0, 20, 5, 0), (1, 0, 5, 0))
        assert slab() is not None
        runner.run(freed_slabs=(0,))
        assert slab() is None
    finally:
        gc.enable()
