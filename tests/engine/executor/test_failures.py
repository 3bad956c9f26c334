"""MLX runs out of memory in a step: sequences start over and get the right tokens."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from engine.cache.layout import UnsupportedLayout
from engine.core import MAX_FAILURES
from engine.cpu.onnx import graphs
from engine.cpu.pages.host_pages import HostPages
from engine.executor.base import PendingStep, is_allocation_failure
from engine.executor.batched import BatchedExecutor
from engine.executor.serial import SerialExecutor
from engine.executor.steps import BatchedStep
from engine.model.errors import FilesChanged
from engine.plan import Plan
from engine.sampling.sampler import Sampler
from tests.engine.conftest import Wrap
from tests.engine.whole import Whole
from tests.oracle import oracle
from tests.tiny_models import VOCAB_SIZE

NO_MEMORY = RuntimeError("[malloc_or_wait] Unable to allocate 12582912 bytes.")
REQUESTS = 8


@pytest.fixture(scope="module")
def engine(llama: Path) -> Whole:
    return Whole(llama, num_blocks=320)


@pytest.fixture
def whole(look_ahead: bool, engine: Whole) -> Whole:
    engine.renew(look_ahead)
    return engine


def prompts() -> list[list[int]]:
    pick = random.Random(5)
    shared = [pick.randrange(3, VOCAB_SIZE) for _ in range(40)]
    return [
        shared[: 40 * (n % 2)] + [pick.randrange(3, VOCAB_SIZE) for _ in range(n + 3)]
        for n in range(REQUESTS)
    ]


def submit_all(whole: Whole, given: list[list[int]]) -> None:
    for number, prompt in enumerate(given):
        whole.submit(f"r{number}", prompt, 20 + number)


@pytest.mark.skipif(bool(graphs.unusable()), reason=graphs.unusable())
def test_without_memory_onnx_runtimes_error_is_known_too() -> None:
    """Its result is larger than any address space."""
    graph, count = graphs.Graph(), 1 << 23
    product = graph.node("MatMul", graph.input("x", "rows", 1), graph.input("y", 1, "columns"))
    graph.output(product, "rows", "columns")
    given = np.zeros((count, 1), np.float32)
    with pytest.raises(Exception, match="alloc") as raised:
        graph.session(threads=1)(given, given.T)
    assert is_allocation_failure(raised.value)


def failing(original: Callable[..., Any], when: Iterator[bool]) -> Callable[..., Any]:
    """Return ``original``, except that a call raises if the next of ``when`` is true."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if next(when):
            raise NO_MEMORY
        return original(*args, **kwargs)

    return call


def at(*calls: int) -> Iterator[bool]:
    """Yield whether each call is one of the numbers ``calls``."""
    number = 0
    while True:
        yield number in calls
        number += 1


def check_texts(whole: Whole, path: Path, but: str = "") -> None:
    truth = oracle(path)
    for number, prompt in enumerate(prompts()):
        if f"r{number}" != but:
            text = whole.texts[f"r{number}"]
            assert len(text) == 20 + number and whole.ends[f"r{number}"].finish == "length"
            truth.check_same(prompt, text, greedy(path, number))


@cache
def greedy(path: Path, number: int) -> list[int]:
    return oracle(path).greedy(prompts()[number], 20 + number)


@pytest.mark.parametrize(
    ("look_ahead", "owner", "name", "calls"),
    [
        (False, HostPages, "resize", (0,)),
        (True, HostPages, "resize", (0,)),
        (True, HostPages, "write_tokens", (30,)),
        (False, HostPages, "write_tokens", (9,)),
        (False, Sampler, "sample", (0, 1, 2)),
        (True, Sampler, "sample", (9,)),
        (False, BatchedStep, "read", (0,)),
        (True, BatchedStep, "read", (11,)),
    ],
)
def test_all_sequences_start_over_and_get_the_same_tokens(
    whole: Whole,
    llama: Path,
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    name: str,
    calls: tuple[int, ...],
) -> None:
    monkeypatch.setattr(owner, name, failing(getattr(owner, name), at(*calls)))
    for number, prompt in enumerate(prompts()):
        whole.submit(f"r{number}", prompt, 20 + number)
        whole.turns(3 if number == 3 else 0)
    whole.run()
    assert whole.scheduler.stats().preemptions_total >= 2
    assert whole.cached == set(whole.scheduler.cached_hashes())
    assert whole.scheduler.stats().unevictable_bytes == 0
    check_texts(whole, llama)


def test_a_chunk_that_runs_out_of_memory_does_not_fail_its_request(
    whole: Whole, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit_all(whole, prompts())
    assert isinstance(whole.executor, BatchedExecutor)
    batch = whole.executor.batch_class
    monkeypatch.setattr(batch, "logits", failing(batch.logits, at(0, 1, 5)))
    whole.run()
    check_texts(whole, llama)


def test_only_the_request_that_never_fits_ends_with_an_error(
    whole: Whole, llama: Path, wrap: Wrap
) -> None:
    whole.renew(whole.executor.spec.look_ahead, prefill_chunk_tokens=512)
    given = prompts()
    given[3] = given[3] + [9] * 100
    submit_all(whole, given)
    assert isinstance(whole.executor, BatchedExecutor)

    @wrap(whole.executor.batch_class, "logits")
    def short_of_memory(logits: Any, batch: Any, model: Any, tokens: Any, **more: Any) -> mx.array:
        if (tokens == 9).sum().item() > 50:
            raise NO_MEMORY
        return logits(batch, model, tokens, **more)

    whole.run()
    assert whole.ends["r3"].finish == "error"
    assert "Unable to allocate" in (whole.ends["r3"].error or "")
    check_texts(whole, llama, but="r3")


def test_a_failing_step_without_sequences_ends_the_engine(
    whole: Whole, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The supervisor starts another engine."""
    whole.submit("a", prompts()[0], 4)
    monkeypatch.setattr(type(whole.executor), "dispatch", failing(lambda: None, at(*range(9))))
    whole.turn()
    assert not whole.ends, "the cache may have been too large, so it tries once more"
    whole.turn()
    assert whole.ends["a"].finish == "error"
    monkeypatch.setattr(whole.scheduler, "schedule", lambda room: "a plan without sequences")
    with pytest.raises(RuntimeError, match="without any sequence"):
        whole.turn()


LOST = "[METAL] Command buffer execution failed: Ignored (for causing prior/excessive GPU errors)."


@pytest.mark.parametrize(("message", "steps"), [(LOST, 2), ("[METAL] unknown", MAX_FAILURES + 1)])
def test_an_engine_ends_if_no_step_succeeds_any_more(
    whole: Whole, monkeypatch: pytest.MonkeyPatch, message: str, steps: int
) -> None:
    """macOS ignores a process after errors of its GPU. A new process has a new queue."""

    def dispatch(plan: Plan) -> None:
        raise RuntimeError(message)

    monkeypatch.setattr(whole.executor, "dispatch", dispatch)
    submit_all(whole, prompts() * 2)
    whole.turns(steps - 1)
    with pytest.raises(RuntimeError, match=r"no more work|in a row"):
        whole.turn()


def test_chunks_are_shorter_after_one_that_took_too_long_for_the_device(
    whole: Whole, monkeypatch: pytest.MonkeyPatch, wrap: Wrap
) -> None:
    """macOS stops a GPU that is busy with one operation for seconds."""
    interrupted = "[METAL] Command buffer execution failed: Impacting Interactivity (0000000e)."
    whole.renew(whole.executor.spec.look_ahead, prefill_chunk_tokens=256)

    @wrap(whole.executor, "dispatch")
    def limited(dispatch: Callable[[Plan], PendingStep], plan: Plan) -> PendingStep:
        if any(len(chunk.token_ids) > 40 for chunk in plan.chunks):
            raise RuntimeError(interrupted)
        return dispatch(plan)

    monkeypatch.setattr("engine.scheduler.timing.chunks.MIN_TOKENS", 16)
    whole.serve("long", [3 + 7 * i % 250 for i in range(200)], 4)
    assert whole.ends["long"].finish == "length", whole.ends["long"].error


def test_chunks_are_not_shorter_after_a_decode_that_took_too_long(
    whole: Whole, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted = "[METAL] Command buffer execution failed: Internal Error (0000000e:Internal)."
    dispatch, failures = whole.executor.dispatch, [2]

    def limited(plan: Plan) -> PendingStep:
        if plan.decodes and not plan.chunks and not plan.stretches and failures[0]:
            failures[0] -= 1
            raise RuntimeError(interrupted)
        return dispatch(plan)

    whole.renew(False)
    monkeypatch.setattr(whole.executor, "dispatch", limited)
    whole.submit("a", prompts()[0], 4)
    whole.run()
    assert whole.ends["a"].finish == "error" and interrupted in (whole.ends["a"].error or "")


def unsupported(model: Any) -> None:
    raise UnsupportedLayout("of a kind that slots cannot hold")


def test_the_serial_executor_recovers_too(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.proving.choose.probe_layout", unsupported)
    whole = Whole(llama)
    assert isinstance(whole.executor, SerialExecutor)
    submit_all(whole, prompts())
    monkeypatch.setattr(Sampler, "sample", failing(Sampler.sample, at(5)))
    whole.run()
    check_texts(whole, llama)


def test_an_engine_ends_if_its_model_was_written_to(llama: Path, tmp_path: Path) -> None:
    """Its embedding is looked up in the file."""
    path = Path(shutil.copytree(llama, tmp_path / "model"))
    whole = Whole(path, num_blocks=256)
    whole.serve("a", prompts()[0], 4)
    assert whole.ends["a"].finish == "length"
    (path / "model.safetensors").touch()
    with pytest.raises(FilesChanged, match=r"model\.safetensors was modified while its model"):
        whole.serve("b", prompts()[1], 4)
