"""A pass of chunks that is left between two layers, on tiny random models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from engine.backend.gpu_path import forced_gpu_path
from engine.batch.layered import LayeredPass
from engine.executor.batched import BatchedExecutor
from engine.plan import Chunk, Decode, Slot, Stretch
from engine.scheduler.timing.chunks import ChunkPolicy
from tests.engine.conftest import Wrap
from tests.engine.executor.by_hand import GREEDY, PlanRunner, chunk
from tests.engine.whole import Whole
from tests.engine.whole import random_tokens as prompt
from tests.tiny_models import Kind

CASES: list[tuple[str, Kind, int]] = [
    *(("GPU", "llama", 8), ("GPU", "gemma3", 16), ("GPU", "qwen3_next", 8), ("GPU", "mamba", 16)),
    *(("CPU", "llama", 16), ("CPU", "gpt_oss", 8)),
]
"""Paths, models, and bits of their keys and values."""
FEW: list[tuple[str, Kind, int]] = [
    ("GPU", "llama", 16),
    *(("CPU", "llama", 16), ("CPU", "qwen3_next", 16)),  # last, so that what follows is on a CPU
]


@pytest.fixture(scope="module", params=FEW, ids=str)
def whole(request: pytest.FixtureRequest, tiny_model: Callable[..., Path]) -> Iterator[Whole]:
    path, kind, kv_bits = request.param
    with forced_gpu_path() if path == "GPU" else nullcontext():
        yield Whole(tiny_model(kind), num_blocks=1024, kv_bits=kv_bits)


def answers(whole: Whole, *, layers: int) -> tuple[dict[str, list[int]], dict[str, list[Any]]]:
    """Return texts and log-probabilities of requests, one after the other: each decode is then in
    the same batch every time."""
    whole.renew(whole.executor.spec.look_ahead, layers=layers, prefill_chunk_tokens=48)
    for number in range(3):
        whole.serve(f"r{number}", prompt(number, 20 + 50 * number), 6, logprobs=2)
    return whole.texts, whole.logprobs


@pytest.mark.parametrize("whole", CASES, ids=str, indirect=True)
def test_no_bit_of_a_result_depends_on_where_a_pass_is_divided(
    whole: Whole, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = whole.executor.spec.layers
    assert layers > 1
    expected = answers(whole, layers=1)
    passes = whole.scheduler.stats().prefill_passes_total
    assert whole.scheduler.stats().prefill_stretches_total == passes > 0
    monkeypatch.setattr(ChunkPolicy, "unit_s", lambda _, **how: 1e-9)
    assert answers(whole, layers=layers) == expected
    stats = whole.scheduler.stats()
    assert stats.prefill_passes_total == passes
    assert stats.prefill_stretches_total == layers * passes


class Runner(PlanRunner):
    """Begins passes, and goes on with them."""

    def __init__(self, whole: Whole) -> None:
        assert isinstance(whole.executor, BatchedExecutor)
        whole.executor.reset()
        self.layers = whole.executor.spec.layers
        super().__init__(whole.executor, 4, 128)

    def begin(self, *chunks: Chunk) -> int:
        """Compute the first layer. Return the number of the pass."""
        self.run(chunks=chunks, stretches=(Stretch(self.step + 1, 1),))
        return self.step

    def first_token(self, slot: Slot, tokens: list[int]) -> int:
        decode = Decode(slot, len(tokens) - 1, tokens[-1], 0, GREEDY)
        return self.run(decodes=(decode,)).tokens[0]


@pytest.fixture
def runner(whole: Whole) -> Runner:
    return Runner(whole)


def alone(runner: Runner, tokens: list[int]) -> int:
    slot = 2
    runner.run(chunks=(chunk(slot, tokens),))
    return runner.first_token(slot, tokens)


def test_decodes_and_other_passes_come_between_two_layers(runner: Runner) -> None:
    one, two, three = prompt(1, 40), prompt(2, 30), prompt(3, 20)
    expected = [alone(runner, tokens) for tokens in (one, two, three)]
    runner.run(chunks=(chunk(0, one),))
    long = runner.begin(chunk(1, two))
    assert runner.first_token(0, one) == expected[0]
    short = runner.begin(chunk(2, three))
    runner.run(stretches=(Stretch(short, runner.layers),))
    assert runner.first_token(2, three) == expected[2]
    for end in range(2, runner.layers + 1):
        runner.run(stretches=(Stretch(long, end),))
    assert runner.first_token(1, two) == expected[1]
    assert not runner.executor._passes.open


def test_a_dropped_pass_leaves_its_slot_to_others(runner: Runner) -> None:
    tokens = prompt(4, 30)
    expected = alone(runner, tokens)
    dropped = runner.begin(chunk(1, prompt(5, 50)))
    runner.run(dropped_passes=(dropped,), chunks=(chunk(1, tokens),))
    assert runner.first_token(1, tokens) == expected
    assert not runner.executor._passes.open
    runner.run(stretches=(Stretch(dropped, runner.layers),), dropped_passes=(dropped, 99))


def test_the_number_of_pages_may_change_while_a_pass_is_open(runner: Runner) -> None:
    tokens = prompt(6, 40)
    expected = alone(runner, tokens)
    number = runner.begin(chunk(1, tokens))
    runner.run(num_pages=5 * 128)
    runner.run(stretches=(Stretch(number, runner.layers),))
    assert runner.first_token(1, tokens) == expected


def test_of_two_chunks_the_one_that_raises_between_layers_fails_alone(
    runner: Runner, wrap: Wrap
) -> None:
    good, bad = prompt(7, 30), prompt(8, 30)
    expected = alone(runner, good)
    number = runner.begin(chunk(0, good), chunk(1, bad))

    @wrap(LayeredPass, "advance")
    def raising(advance: Callable[..., list[Any]], one: Any, end: int) -> list[Any]:
        if any(row.slot == 1 for row in one._batch.rows):
            raise ValueError("this row")
        return advance(one, end)

    result = runner.run(stretches=(Stretch(number, runner.layers),))
    assert result.failed == ((1, "ValueError: this row"),)
    assert runner.first_token(0, good) == expected
    assert not runner.executor._passes.open


def test_a_reset_gives_up_open_passes(runner: Runner) -> None:
    before = mx.get_active_memory()
    runner.begin(chunk(1, prompt(9, 60)))
    runner.executor.reset()
    assert not runner.executor._passes.open
    assert mx.get_active_memory() <= before


@pytest.mark.parametrize("ends", [(16, 3, 2), (32, 1)])
def test_a_decode_computes_known_tokens_with_the_bits_of_chunks(
    llama: Path, ends: tuple[int, ...]
) -> None:
    """Beside a decode without any."""
    whole = Whole(llama, num_blocks=1024)
    runner = Runner(whole)
    assert whole.executor.spec.decodes_ends and whole.executor.deterministic
    slots = [3, 0, 1, 2]
    prompts = [prompt(number, 40 + 9 * number) for number in range(1 + len(ends))]
    found: list[list[list[float]]] = []
    whole.executor.logits_observer = lambda _, logits: found.append(logits.tolist())
    for joins in (False, True):
        decodes = []
        for slot, tokens, end in zip(slots, prompts, (0, *ends), strict=False):
            cut = len(tokens) - 1 - (end if joins else 0)
            runner.run(chunks=(Chunk(slot, 0, tuple(tokens[:cut])),))
            before = tuple(tokens[cut:-1])
            decodes.append(Decode(slot, len(tokens) - 1, tokens[-1], 0, GREEDY, before=before))
        runner.run(decodes=tuple(decodes))
        later = (Decode(d.slot, d.position + 1, 5, 1, GREEDY) for d in decodes)
        runner.run(decodes=tuple(later))
    assert len(found) == 4 and len(found[0]) == len(prompts)
    assert found[:2] == found[2:]
