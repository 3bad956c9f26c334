"""The executors against mlx-lm's own caches, on tiny random models, by logits or tokens."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import mlx.core as mx
import pytest

from engine.cache.layout import probe_layout
from engine.cache.pages import Pages
from engine.executor.base import PendingStep
from engine.plan import Chunk, CopyPage, Export, Insert, Table
from shared.wire import SamplingParams, TokenLogprobs
from tests.engine.executor.by_hand import (
    GREEDY,
    PAGE,
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
    runner = Runner(model, rows=5)
    slots = [2, 4, 0, 3, 1]
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


def test_pages_are_read_by_several_slots_copied_in_part_and_restored_from_bytes(
    model: Any,
) -> None:
    tokens = prompt(3, 60)
    expected = alone(model, tokens, 5)
    runner = Runner(model)
    runner.prefill(0, tokens[:-1])
    first, second, third, *_ = runner.executor._slots.tables[0]
    exported = runner.run(
        exports_first=(Export(7, first),),
        chunks=(Chunk(0, 0, tuple(prompt(4, 16))),),  # overwrites it
        exports=(Export(8, second),),
    ).exported
    assert [e.block_id for e in exported] == [7, 8]
    copies = {e.block_id: tuple(bytes(part) for part in e.payload) for e in exported}
    own = runner.executor._slots.tables
    runner.run(
        tables=(Table(3, 1, (second, *own[3][2:])), Table(1, 2, own[1][2:])),
        copies=(CopyPage(third, own[3][2], 10),),
        inserts=(Insert(0, copies[7], own[3][0]),),
    )
    runner.prefill(3, tokens[42:-1], start=42)
    runner.run(
        inserts=(Insert(0, copies[7], own[1][0]), Insert(0, copies[8], own[1][1])),
    )
    runner.prefill(1, tokens[2 * PAGE : -1], start=2 * PAGE)
    assert runner.generate(3, tokens, 5, known=True) == expected
    assert runner.generate(1, tokens, 5, known=False) == expected


def test_penalties_see_tokens_that_the_host_does_not_know_yet(model: Any) -> None:
    """Tokens stay on the device. One row joins late."""
    one, two = prompt(11, 30), prompt(12, 12)
    runner = Runner(model)
    runner.prefill(2, one[:-1])
    runner.prefill(1, two[:-1])
    slots = [2, 1]
    outputs: tuple[list[int], list[int]] = ([], [])
    for turn in range(12):
        decodes = []
        for tokens, slot, out in ((one, slots[0], outputs[0]), (two, slots[1], outputs[1])):
            if tokens is one or turn >= 3:
                history = None if out else tuple(tokens[:-1])
                decodes.append(next_decode(slot, tokens, len(out), PENALIZED, history=history))
        result = runner.run(decodes=tuple(decodes))
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
    )
    assert [slot for slot, _ in result.failed] == [0]
    scores = [(one.slot, len(one.logprobs)) for one in result.prompt_logprobs]
    assert scores == [(1, 19)] * scored
    assert runner.generate(1, good, 3, known=True) == alone(model, good, 3)


def test_sequences_keep_their_pages_while_the_number_of_pages_changes(model: Any) -> None:
    """With look-ahead: each plan is dispatched before the one before it is read."""
    prompts = [prompt(i, n) for i, n in enumerate((40, 9, 23, 30), 50)]
    runner = Runner(model, rows=4)
    used = 4 * 128 // PAGE
    outputs: list[list[int]] = [[] for _ in prompts]
    resized = {3: used + 3, 6: used + 90, 7: used}  # after a turn
    pending: list[tuple[PendingStep, list[int]]] = []
    for turn in range(14):
        running = [i for i in range(4) if 2 * i < turn]
        joining = [i for i in range(4) if 2 * i == turn]
        decodes = tuple(next_decode(i, prompts[i], turn - 2 * i - 1) for i in running)
        chunks = tuple(chunk(i, prompts[i]) for i in joining)
        step = runner.dispatch(num_pages=resized.get(turn, 0), decodes=decodes, chunks=chunks)
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
def test_steps_write_pages_in_place(
    model: Any, sampling: SamplingParams, logprobs: int | None
) -> None:
    """Pages have 64 MB, so a copy of those of one layer would show in the peak."""
    layout = probe_layout(model)
    capacity = (64 << 20) // (8 * layout.token_bytes)
    runner = Runner(model, rows=8, capacity=capacity)
    slots = list(range(8))
    array_bytes = (64 << 20) // len(layout.layers)

    def steps(first: int) -> None:
        pending: list[PendingStep] = []
        for index in range(first, first + 6):
            decodes = (next_decode(s, [5] * 41, index, sampling, logprobs=logprobs) for s in slots)
            dispatched = runner.dispatch(
                decodes=tuple(decodes),
                chunks=(Chunk(slots[0], 0, (5,) * 30),),
                exports=(Export(100 + index, 1),),
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


def test_pages_are_released_without_the_garbage_collector(model: Any) -> None:
    runner = Runner(model)
    pages: weakref.ref[Pages] = weakref.ref(runner.executor._pages)
    gc.collect()
    gc.disable()
    try:
        runner.prefill(0, prompt(1, 20))
        runner.decode((0, 20, 5, 0), (1, 0, 5, 0))
        runner.executor.reset()
        assert pages() is None
    finally:
        gc.enable()
