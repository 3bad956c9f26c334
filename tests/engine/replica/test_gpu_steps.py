"""Steps as on a GPU, forced on the CPU: what they wait for, when tokens leave, and their memory.

Only where MLX computes differs: pages are written by its graph, steps are dispatched ahead of their
results, sampling and copies are operations of MLX."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from engine.backend import gpu_path
from engine.batch.gpu import GPUBatch
from engine.cache.quantization import Precision
from engine.executor.batched import BatchedExecutor
from engine.executor.line import DeviceLine
from engine.executor.prefill import Prefill
from engine.executor.spec import SCORE_ARRAYS
from engine.executor.steps import BatchedStep
from engine.scheduler.timing.chunks import ChunkPolicy
from shared import wire
from tests.engine.conftest import Wrap
from tests.engine.waits import WaitCounter
from tests.engine.whole import Whole, noted_plans, random_tokens
from tests.oracle import Oracle
from tests.tiny_models import make_tiny

BLOCK, PAGE = 16, 64


@pytest.fixture(autouse=True, scope="module")
def on_a_gpu() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:  # as in forced_gpu_path, but compiled
        patch.setattr(mx, "default_device", lambda: mx.gpu)
        patch.setattr(gpu_path, "forced", True)
        yield


def forced(path: Path, **settings: Any) -> Whole:
    whole = Whole(path, num_blocks=60_000, **settings)  # steps with drafts are no steady ones
    assert isinstance(whole.executor, BatchedExecutor)
    assert whole.executor.spec.look_ahead
    return whole


@pytest.fixture(scope="module", params=[16, 8])
def engine(request: pytest.FixtureRequest, llama: Path) -> Whole:
    whole = forced(llama, kv_bits=request.param)
    assert issubclass(whole.executor.batch_class, GPUBatch)  # type: ignore[attr-defined]
    return whole


@pytest.fixture
def whole(engine: Whole) -> Whole:
    engine.renew_with_store()
    return engine


of_any_precision = pytest.mark.parametrize("engine", [16], indirect=True)
"""Of tests of the order and the time of steps."""


def step_numbers(whole: Whole) -> int:
    return whole.scheduler.stats().steps_total


def test_a_steady_step_waits_once_even_with_shared_pages_and_exports(
    whole: Whole, monkeypatch: pytest.MonkeyPatch, wrap: Wrap
) -> None:
    """The prefixes of those that join are cached whole: they need no chunks."""
    steps, shared = 100, random_tokens(1, 3 * PAGE + 1)
    for number in range(6):
        sampling = wire.SamplingParams(seed=number, temperature=1.0)
        whole.submit(f"long {number}", shared, steps + 20, sampling=sampling)
    whole.submit("short", shared, 8)
    whole.turn_until(lambda: "short" in whole.ends)
    waits = WaitCounter(monkeypatch)
    plans = noted_plans(whole, wrap)
    stored = len(whole.stored)
    whole.turn()
    for number in range(steps):
        if number % 30 == 29:  # it finds its pages
            whole.submit(f"joins {number}", shared, 5)
        before = waits.count
        whole.turn()
        assert waits.count == before + 1, waits.places[before:]
    assert len(plans) >= steps and all(plan.decodes and not plan.chunks for plan in plans)
    assert any(len(table.pages) > 2 for plan in plans for table in plan.tables)
    assert any(plan.exports for plan in plans)
    assert len(whole.stored) >= stored + 5 * (steps // PAGE)
    whole.run()
    assert {len(text) for name, text in whole.texts.items() if "long" in name} == {steps + 20}


def test_a_chunk_waits_for_the_decodes_before_it_and_for_nothing_else(
    whole: Whole, monkeypatch: pytest.MonkeyPatch, wrap: Wrap
) -> None:
    whole.submit("streams", random_tokens(2, 40), 200)
    whole.turns(12)  # its blocks are exported by then
    whole.submit("joins", random_tokens(3, 600), 2)
    waits = WaitCounter(monkeypatch)
    chunks = 0

    @wrap(Prefill, "_advance")
    def forward(build: Callable[..., Any], *args: Any) -> Any:
        nonlocal chunks
        chunks += 1
        return build(*args)

    before = step_numbers(whole)
    whole.turn_until(lambda: "joins" in whole.ends)
    assert chunks >= 2  # each a stretch of layers
    # Each step of the stream, each chunk, and the new pages of the new sequence.
    assert waits.count <= step_numbers(whole) - before + chunks + 2, "\n".join(waits.places)


@of_any_precision
def test_tokens_are_sent_before_chunks_are_dispatched(whole: Whole, wrap: Wrap) -> None:
    events: list[str] = []

    @wrap(BatchedStep, "_send_pass")
    def noted_pass(send_pass: Callable[..., None], step: BatchedStep, built: Any) -> None:
        if step.plan.decodes:
            events.append(f"chunks of {step.plan.step}")
        send_pass(step, built)

    @wrap(whole, "send")
    def noted_send(send: Callable[..., None], messages: Any) -> None:
        if any(isinstance(message, wire.Tokens) for message in messages):
            events.append("tokens")
        send(messages)

    whole.submit("streams", random_tokens(4, 3), 200)
    whole.turns(3)
    whole.submit("joins", random_tokens(5, 700), 2)
    events.clear()
    whole.turn_until(lambda: "joins" in whole.ends)
    chunks = [place for place, event in enumerate(events) if event.startswith("chunks")]
    assert len(chunks) >= 2
    assert all(events[place - 1] == "tokens" for place in chunks)
    assert len(whole.texts["streams"]) >= len(events) - len(chunks)


@of_any_precision
def test_the_time_of_a_chunk_is_not_that_of_the_next_decode(
    whole: Whole, monkeypatch: pytest.MonkeyPatch, wrap: Wrap
) -> None:
    of_chunks: list[float] = []
    of_decodes: list[float] = []
    monkeypatch.setattr(
        ChunkPolicy, "observe_chunks", lambda _, chunks, seconds, **how: of_chunks.append(seconds)
    )
    monkeypatch.setattr(
        ChunkPolicy, "observe_decodes", lambda _, seconds: of_decodes.append(seconds)
    )
    whole.submit("streams", random_tokens(6, 3), 30)
    whole.turns(4)
    slow: list[Any] = []

    @wrap(BatchedStep, "_send_pass")
    def slow_pass(send_pass: Callable[..., None], step: BatchedStep, built: Any) -> None:
        send_pass(step, built)
        slow.append(step.line.piece)

    @wrap(DeviceLine, "wait")
    def slow_wait(wait: Callable[..., None], line: DeviceLine) -> None:
        if line.piece is not None and line.piece in slow:
            time.sleep(0.3)
        wait(line)

    of_chunks.clear()
    of_decodes.clear()
    whole.submit("joins", random_tokens(7, 300), 2)
    whole.run()
    # Chunks are divided, and nothing is learned from their first layers.
    assert len(slow) // 2 <= len(of_chunks) <= len(slow) and min(of_chunks) >= 0.3
    assert len(of_decodes) >= 20 and sorted(of_decodes)[len(of_decodes) // 2] < 0.3
    # Another program may hold up a decode, but not one after each chunk.
    assert sum(elapsed_s >= 0.3 for elapsed_s in of_decodes) < len(slow)


def test_texts_are_right_with_every_feature_at_once(whole: Whole, llama: Path) -> None:
    check_texts(whole, llama)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gemma3", "gpt_oss", "qwen3_next"])
def test_texts_of_windows_sinks_and_recurrent_layers_are_right(
    tiny_model: Callable[..., Path], kind: str
) -> None:
    whole = forced(tiny_model(kind))
    whole.renew_with_store()
    check_texts(whole, tiny_model(kind))


def test_one_sequence_at_a_time_in_chunks_of_a_block_has_the_same_bits(llama: Path) -> None:
    """Alone, with cached blocks, and among others: settings of docs/design/cpu.md."""
    alone = {"max_batch_size": 1, "prefill_batch_size": 1, "prefill_chunk_tokens": BLOCK}
    whole = forced(llama, kv_bits=8, **alone)
    shared = random_tokens(8, 70)
    prompts = {
        f"r{n}": shared[: 70 * (n % 2)] + random_tokens(20 + n, 5 + 37 * n % 90) for n in range(4)
    }

    def scores(*, together: bool) -> dict[str, list[float]]:
        for name, tokens in prompts.items():
            whole.submit(name, tokens, 12, logprobs=1)
            if not together:
                whole.run()
        whole.run()
        return {name: whole.scores(name) for name in prompts}

    first, again = scores(together=False), scores(together=False)
    assert whole.scheduler.stats().cached_ram_tokens_total > 200
    whole.renew(look_ahead=True)
    assert first == again == scores(together=True)


def test_answers_do_not_depend_on_pages_that_come_and_go_around_them(
    whole: Whole, wrap: Wrap
) -> None:
    prompts = [[(7 * i + j) % 200 + 3 for j in range(5 + 13 * i % 60)] for i in range(10)]
    limit_bytes = 150 * whole.scheduler.config.block_bytes

    def texts(rows: int) -> dict[str, list[int]]:
        sizes = {"max_batch_size": rows, "completion_batch_size": rows, "context_length": 512}
        whole.renew(True, None, limit_bytes=limit_bytes, **sizes)
        for number, tokens in enumerate(prompts):  # they join one after another
            whole.submit(f"r{number}", tokens, 10 + number)
            whole.turn()
        whole.run()
        return whole.texts

    alone, plans = texts(rows=1), noted_plans(whole, wrap)
    together = texts(rows=8)
    assert sum(plan.num_pages > 0 for plan in plans) >= 1
    assert together == alone
    assert [len(text) for text in together.values()] == list(range(10, 20))


def check_texts(whole: Whole, path: Path) -> None:
    """Uneven prompts that share prefixes join and leave; pages go to the kvstore and come back;
    log-probabilities of outputs and prompts are asked for beside penalties."""
    bits = whole.executor.spec.kv_bits
    oracle = Oracle(path, rounded=Precision(bits))
    shared = random_tokens(8, 130)
    prompts = {
        f"r{n}": shared[: 130 * (n % 2)] + random_tokens(20 + n, 1 + 37 * n % 90) for n in range(10)
    }
    for number, (name, tokens) in enumerate(prompts.items()):
        whole.submit(
            name,
            tokens,
            12 + 2 * number,
            logprobs=2 if number % 3 == 0 else None,
            prompt_logprobs=1 if number == 4 else None,
        )
        whole.turn()
    whole.submit("penalized", shared, 20, sampling=wire.SamplingParams(seed=1, presence_penalty=1))
    whole.submit("aborted", random_tokens(9, 900), 20)
    whole.turn()
    whole.scheduler.abort("aborted", 0)
    whole.run()
    assert {end.finish for end in whole.ends.values()} == {"length"}
    expected = {name: oracle.greedy(prompts[name], len(whole.texts[name])) for name in prompts}
    for name, tokens in prompts.items():
        oracle.check_same(tokens, whole.texts[name], expected[name])
    assert len(whole.stored) > 5 or whole.executor.spec.state_bytes
    again = whole.texts
    whole.renew_with_store(whole.stored)
    for name in ("r1", "r3"):
        whole.submit(name, prompts[name] + again[name], 12)
    whole.turn_until(lambda: whole.scheduler.idle)
    if not whole.executor.spec.state_bytes:  # the store in this process has no states
        assert whole.scheduler.stats().cached_ssd_tokens_total >= 2 * PAGE
    for name in ("r1", "r3"):
        longer = prompts[name] + again[name]
        oracle.check_same(longer, whole.texts[name], oracle.greedy(longer, 12))


@pytest.mark.parametrize("kv_bits", [8, 16])
def test_pages_are_written_in_place_and_temporaries_are_bounded(
    tmp_path: Path, wrap: Wrap, kv_bits: int
) -> None:
    """Eight long rows, of which seven begin with shared pages, with exports. The pages of a layer
    are larger than what a step may take beside the ledger's memory."""
    length = 1900
    fields = {"num_key_value_heads": 2, "num_attention_heads": 2, "head_dim": 64}
    path = make_tiny("llama", tmp_path, max_position_embeddings=4096, **fields)
    settings = {"prefill_chunk_tokens": 64}  # each row in each step
    whole = Whole(path, num_blocks=24_000, kv_bits=kv_bits, **settings)
    config = whole.scheduler.config
    whole.renew_with_store()
    shared = random_tokens(1, length)
    # Scores of a chunk (heads, 64, length) in fp32, twice, and what eight rows gather in a layer.
    allowed_bytes = 2 * 2 * 64 * length * 4 + 8 * 2 * length * config.gather_token_bytes
    worst = 0
    plans = noted_plans(whole, wrap)

    def turns(until: Callable[[], bool]) -> None:
        nonlocal worst
        while not until():
            ledger = whole.scheduler.memory.ledger
            mx.reset_peak_memory()
            reserved = ledger.used_bytes
            whole.turn()
            reserved = max(reserved, ledger.used_bytes)
            taken = mx.get_peak_memory() - whole.before_bytes - whole.weight_bytes
            worst = max(worst, taken - reserved)

    whole.submit("first", shared, 70)
    turns(lambda: bool(whole.texts["first"]))
    for number in range(7):
        whole.submit(f"r{number}", [*shared[:-10], number + 3, 5], 40)
        begun = step_numbers(whole)
        turns(lambda begun=begun: step_numbers(whole) >= begun + 3)  # type: ignore[misc]
    turns(lambda: whole.scheduler.idle)
    contents = whole.executor._pages.contents  # type: ignore[attr-defined]
    layer_bytes = min(array.nbytes for array in contents)
    assert whole.scheduler.stats().cached_ram_tokens_total > 7 * (length - 80)
    assert max(len(plan.decodes) for plan in plans) == 8
    assert any(len(plan.decodes) == 8 and plan.exports for plan in plans)
    assert worst <= allowed_bytes, (worst, allowed_bytes, layer_bytes)


def test_scores_that_a_gpu_stores_are_in_the_ledger(tmp_path: Path, wrap: Wrap) -> None:
    """Metal's kernels for many queries know heads of 64 elements, and not of 32."""
    fields = {"num_key_value_heads": 2, "num_attention_heads": 8, "max_position_embeddings": 8192}
    path = make_tiny("llama", tmp_path / "32", head_dim=32, **fields)
    whole = Whole(path, num_blocks=60_000, prefill_chunk_tokens=1024)
    config, memory = whole.scheduler.config, whole.scheduler.memory
    assert config.score_bytes == SCORE_ARRAYS * 8 * 4
    reserved, passes = [0], [0]

    @wrap(memory, "reserve_pass")
    def noting(reserve_pass: Callable[[int], bool], size_bytes: int) -> bool:
        could = reserve_pass(size_bytes)  # a pass may begin and end in one turn
        reserved.append(memory.ledger.used_bytes)
        passes.append(memory.pass_bytes)
        return could

    whole.submit("long", random_tokens(1, 2500), 2)
    worst = 0
    while not whole.scheduler.idle:
        mx.reset_peak_memory()
        reserved[:] = [memory.ledger.used_bytes]
        whole.turn()
        taken = mx.get_peak_memory() - whole.before_bytes - whole.weight_bytes
        worst = max(worst, taken - max(*reserved, memory.ledger.used_bytes))
    most = max(passes)
    assert worst < 16 << 20 < most <= config.limit_bytes / 2, (worst, most)


def test_scores_in_a_kernel_take_no_memory(tmp_path: Path) -> None:
    path = make_tiny("llama", tmp_path, head_dim=64)
    assert Whole(path, num_blocks=2000).executor.spec.score_bytes == 0
