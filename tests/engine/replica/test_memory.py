"""The memory of the device: how much is taken, and that the ledger accounts for all of it."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable, Iterator
from math import lcm
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from engine.backend.threads import num_threads
from engine.cpu.attention import host_batch as host
from engine.cpu.attention.tiles import FEWEST
from engine.cpu.pages import host_pages
from engine.cpu.pages.host_pages import MAX_IDLE_SCRATCH_BYTES
from engine.cpu.pages.unpacked import IDLE_BYTES
from engine.executor.base import ExecutorSpec
from engine.replica import memory
from engine.replica.memory import EngineMemory, MemorySizes
from engine.scheduler import memory as scheduler_memory
from shared.settings import Settings
from shared.wire import SamplingParams
from tests.engine.whole import Whole
from tests.tiny_models import VOCAB_SIZE

GB = 10**9
MAX_KEPT_BYTES = MAX_IDLE_SCRATCH_BYTES + IDLE_BYTES
SHARED_BUFFER_BYTES = 16 << 10
"""The most by which the buffer of a small array may be larger than the array in MLX."""


def load_with(whole: Whole, count: int, seed: int, longest: int = 900, outputs: int = 60) -> None:
    """Submit random requests, some with shared prefixes, some greedy and some with penalties."""
    pick = random.Random(seed)
    shared = longest // 3
    prefixes = [[pick.randrange(3, VOCAB_SIZE) for _ in range(shared)] for _ in range(3)]
    for number in range(count):
        prompt = pick.choice(prefixes)[: pick.randrange(shared)]
        prompt = prompt + [pick.randrange(3, VOCAB_SIZE) for _ in range(pick.randrange(1, longest))]
        sampling = SamplingParams(
            seed=number,
            temperature=pick.choice([0.0, 1.0]),
            repetition_penalty=pick.choice([1.0, 1.0, 1.2]),
        )
        logprobs = pick.choice([None, None, 3])
        whole.submit(
            f"{seed}/{number}",
            prompt,
            pick.randrange(1, outputs),
            sampling=sampling,
            logprobs=logprobs,
        )


def numpy_bytes() -> int:
    """Return the bytes that NumPy has allocated since `tracemalloc` started.

    NumPy's views of MLX's arrays have no memory of their own.
    """
    traces = tracemalloc.take_snapshot().traces  # a filter of it takes many times as long
    return sum(trace.size for trace in traces if trace.domain == np.lib.tracemalloc_domain)


@pytest.fixture
def traced() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()


class Watch:
    """Compares MLX's memory, and pages on the host, after each step with the ledger's bytes and the
    weights.

    ``worst`` is the largest difference, as a part of the latter. Of passes that are open the ledger
    has an estimate, which they may stay below.
    """

    numpy_every_steps = 10

    def __init__(self, whole: Whole, allowed_bytes: int = 0) -> None:
        self.worst = 0.0
        self.peak_bytes = 0
        self.peak_numpy_bytes = 0
        self._steps = 0
        self._whole, self._allowed_bytes = whole, allowed_bytes
        self._weight_bytes = whole.weight_bytes
        whole.after_step = self

    def __call__(self) -> None:
        whole, stats = self._whole, self._whole.scheduler.stats()
        mx.synchronize()
        scheduler = whole.scheduler
        assert scheduler.memory.ledger.used_bytes <= stats.limit_bytes
        known = scheduler.memory.ledger.used_bytes - scheduler.memory.pass_bytes
        open_tokens = sum(one.tokens for one in scheduler.planner.passes)
        open_bytes = open_tokens * scheduler.config.pass_token_bytes
        self.peak_bytes = max(self.peak_bytes, known)
        self._steps += 1
        # The headroom beside the ledger has what is kept for reuse.
        pages = whole.executor._pages  # type: ignore[attr-defined]
        scratch_bytes = getattr(pages, "scratch_bytes", 0)
        idle_bytes = pages.unpacked.idle_bytes if pages.unpacks else 0
        assert scratch_bytes + idle_bytes <= MAX_KEPT_BYTES
        if tracemalloc.is_tracing() and self._steps % self.numpy_every_steps == 0:
            found = numpy_bytes() - open_bytes - scratch_bytes
            self.peak_numpy_bytes = max(self.peak_numpy_bytes, found)
        held = mx.get_active_memory() + whole.executor.host_bytes - scratch_bytes - idle_bytes
        if pages.unpacks:  # the next plan frees the rows of sequences that have ended
            charged = sum(scheduler.memory.unpacked_bytes.values())
            held -= max(0, pages.unpacked.nbytes - charged)
        unknown = held - whole.before_bytes - self._weight_bytes - known
        # What is reserved for pages and unpacked rows is taken as they are written.
        unknown = max(0, unknown - open_bytes)
        unknown -= self._allowed_bytes
        self.worst = max(self.worst, unknown / (known + self._weight_bytes))


@pytest.mark.parametrize(("kind", "kv_bits"), [("llama", 8), ("gemma3", 16), ("gpt_oss", 8)])
@pytest.mark.usefixtures("nothing_reserved")
def test_the_ledger_accounts_for_all_memory(
    tiny_model: Callable[..., Path], kind: str, kv_bits: int
) -> None:
    whole = Whole(tiny_model(kind), num_blocks=280, max_batch_size=8, kv_bits=kv_bits)
    watch = Watch(whole, memory.table_bytes(32, whole.loaded.context_length) // 4)
    load_with(whole, 14, seed=0, longest=600, outputs=30)
    whole.run()
    assert watch.peak_bytes > 0.8 * whole.scheduler.stats().limit_bytes
    assert watch.worst < 0.01


@pytest.mark.parametrize(("kind", "kv_bits"), [("qwen3", 8), ("gemma3", 16), ("qwen3_next", 8)])
@pytest.mark.usefixtures("traced")
def test_the_ledger_accounts_for_the_memory_of_numpy(
    tiny_model: Callable[..., Path], kind: str, kv_bits: int
) -> None:
    """Python counts it, since NumPy's arrays are not MLX's."""
    probe = np.zeros(100_000, np.uint8)
    assert numpy_bytes() >= probe.nbytes
    del probe
    whole = Whole(tiny_model(kind), num_blocks=48, max_batch_size=8, kv_bits=kv_bits)
    watch = Watch(whole)
    load_with(whole, 6, seed=5, longest=250, outputs=8)
    before_bytes = numpy_bytes()
    whole.run()
    assert watch.peak_bytes > 0.8 * whole.scheduler.stats().limit_bytes
    # Tables and indices of the rows that are read take the same few kilobytes in any model.
    held_bytes = watch.peak_bytes + whole.weight_bytes
    assert watch.peak_numpy_bytes - before_bytes < 0.02 * held_bytes + 16_000


@pytest.mark.parametrize("chunk", [None, 4])
def test_the_ledger_has_what_rows_are_read_into(
    tiny_model: Callable[..., Path], chunk: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several threads read a row each. What short rows take has a fixed size, which is left out."""
    monkeypatch.setattr(host, "MAX_SCRATCH_BYTES", 0)
    monkeypatch.setattr(host, "LANE_BYTES", 0)
    monkeypatch.setattr(host, "WORTH_THREADS", 0)
    monkeypatch.setattr(host_pages, "MAX_IDLE_SCRATCH_BYTES", 0)
    monkeypatch.setattr(scheduler_memory, "UNPACKED_SHARE", 0)
    path = tiny_model("llama")
    whole = Whole(path, num_blocks=280, max_batch_size=8, kv_bits=8, prefill_chunk_tokens=chunk)
    assert whole.executor.spec.gather_rows == num_threads()
    pages, most = whole.executor._pages, 0  # type: ignore[attr-defined]

    def check() -> None:
        nonlocal most
        unit = lcm(FEWEST, pages.page_tokens)  # a row ends with a unit that may have no page
        spare = num_threads() * (unit - pages.page_tokens) * pages.layout.layer_value_bytes
        most = max(most, pages.scratch_bytes)
        assert pages.scratch_bytes <= whole.scheduler.memory.gather_bytes + spare

    whole.after_step = check
    load_with(whole, 10, seed=2, longest=600, outputs=20)
    whole.run()
    assert most > 500 * pages.layout.layer_value_bytes


def test_the_ledger_accounts_for_recurrent_state(tiny_model: Callable[..., Path]) -> None:
    """Unused rows have no state yet; the ledger has reserved it."""
    whole = Whole(tiny_model("mamba"), max_batch_size=8, completion_batch_size=8)
    states = 8 * len(whole.executor.layout.states)  # type: ignore[attr-defined]
    watch = Watch(whole, states * SHARED_BUFFER_BYTES)
    load_with(whole, 12, seed=1, longest=100, outputs=30)
    whole.run()
    assert watch.worst < 0.02
    ledger = whole.scheduler.memory.ledger
    assert ledger.used_bytes > 0.9 * 8 * whole.executor.spec.state_bytes


@pytest.mark.slow
def test_the_ledger_accounts_for_the_memory_of_a_real_model(demo_model: Path) -> None:
    rows = {"max_batch_size": 4, "completion_batch_size": 4}
    whole = Whole(demo_model, num_blocks=128, kv_bits=8, **rows)
    watch = Watch(whole)
    load_with(whole, 6, seed=1, longest=90, outputs=12)
    whole.run()
    assert watch.peak_bytes > 0.8 * whole.scheduler.stats().limit_bytes
    assert watch.worst < 0.01  # 110 kB from the first step on, if other engines ran before


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_reserved")
@pytest.mark.parametrize(("kv_bits", "look_ahead"), [(16, False), (8, True)])
def test_forty_requests_with_memory_for_64_blocks_all_get_the_right_text(
    llama: Path, kv_bits: int, look_ahead: bool
) -> None:
    pick = random.Random(3)
    shared = [pick.randrange(3, VOCAB_SIZE) for _ in range(90)]
    requests: dict[str, tuple[list[int], int]] = {}
    for number in range(40):
        prompt = shared[: pick.choice([0, 0, 40, 90])]
        prompt = prompt + [pick.randrange(3, VOCAB_SIZE) for _ in range(pick.randrange(1, 60))]
        requests[f"r{number}"] = prompt, pick.randrange(1, 160)

    def run(num_blocks: int, look_ahead: bool) -> Whole:
        whole = Whole(llama, num_blocks=num_blocks, kv_bits=kv_bits)
        whole.renew(look_ahead)
        watch = Watch(whole, memory.table_bytes(32, whole.loaded.context_length) // 4)
        for number, (name, (prompt, max_tokens)) in enumerate(requests.items()):
            whole.submit(name, prompt, max_tokens, priority=number % 3 // 2)
        whole.run()
        assert watch.worst < 0.02
        assert {end.finish for end in whole.ends.values()} == {"length"}
        return whole

    roomy = run(4096, look_ahead=False)
    assert roomy.scheduler.stats().preemptions_total == 0
    pressed = run(64, look_ahead)
    assert pressed.scheduler.stats().preemptions_total > 5
    assert pressed.scheduler.stats().unevictable_bytes == 0
    for name, (_, max_tokens) in requests.items():
        assert len(pressed.texts[name]) == max_tokens
        assert pressed.texts[name] == roomy.texts[name]


def on_a_device(monkeypatch: pytest.MonkeyPatch, size_bytes: int, *, gpu: bool) -> None:
    monkeypatch.setattr(memory, "device_memory_bytes", lambda: size_bytes)
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu if gpu else mx.cpu)


@pytest.mark.parametrize(
    "info",
    [
        {"max_recommended_working_set_size": 48 * GB, "memory_size": 64 * GB},  # of Metal
        {"total_memory": 48 * GB, "free_memory": 40 * GB},  # of CUDA
    ],
)
def test_a_gpus_own_memory_counts(info: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    monkeypatch.setattr(mx, "device_info", lambda: info)
    assert memory.device_memory_bytes() == 48 * GB


def blocks_of(engines: int, other_bytes: int = 10 * GB, **settings: float) -> int:
    own = EngineMemory.of(Settings(engines=engines, **settings))  # type: ignore[arg-type]
    return memory.default_num_blocks(10**6, other_bytes, own)


def test_a_budget_is_all_the_engines_and_never_more_than_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_a_device(monkeypatch, 64 * GB, gpu=False)
    left = (30 * GB - 10 * GB - memory.HEADROOM_BYTES) // 10**6
    assert blocks_of(1, memory_gb=30.0) == blocks_of(4, memory_gb=30.0) == left
    assert blocks_of(1, memory_gb=500.0) == blocks_of(1, memory_gb=64.0)


def test_the_engines_of_one_model_share_the_memory_of_the_fleet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_a_device(monkeypatch, 64 * GB, gpu=False)
    assert EngineMemory.of(Settings(fleet_memory_gb=8.0)) == EngineMemory(8 * 10**9, True)
    shared = EngineMemory.of(Settings(fleet_memory_gb=8.0, engines=2))
    assert shared == EngineMemory(4 * 10**9, True)
    assert EngineMemory.of(Settings(fleet_memory_gb=999.0)).size_bytes == 64 * GB
    assert blocks_of(1, memory_gb=30.0, fleet_memory_gb=40.0) == blocks_of(1, memory_gb=30.0)


def test_the_pool_gets_the_memory_that_the_weights_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_device(monkeypatch, 64 * GB, gpu=True)
    alone = blocks_of(1)
    assert 0.85 * 53_000 < alone < 53_000
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    assert blocks_of(1) < 0.62 * 53_000, "a Mac is shared"
    monkeypatch.undo()
    on_a_device(monkeypatch, 64 * GB, gpu=True)
    shared = blocks_of(2)
    assert 2 * (shared * 10**6 + 10 * GB) < 64 * GB
    on_a_device(monkeypatch, 64 * GB, gpu=False)
    assert blocks_of(1) < alone / 2


def sizes_of(settings: Settings, context: int = 131_072, **changes: Any) -> MemorySizes:
    """Return the sizes beside 40 GB of weights."""
    fields: dict[str, Any] = {
        "batching": "",
        "look_ahead": True,
        "batches_decodes": True,
        "batches_chunks": True,
        "max_sequences": None,
        "prefix_cache": True,
        "keeps_kv": True,
        "kv_bits": 8,
        "token_bytes": 60_000,
        "state_bytes": 0,
    }
    own = EngineMemory.of(settings)
    return memory.sizes_beside(40 * GB, ExecutorSpec(**fields | changes), context, settings, own)


def test_a_context_that_does_not_fit_reserves_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama 4 Scout was made for ten million positions."""
    on_a_device(monkeypatch, 64 * GB, gpu=True)
    blocks = [sizes_of(Settings(), context).num_blocks for context in (10_485_760, 131_072)]
    assert blocks[0] > 0.99 * blocks[1]


@pytest.mark.parametrize(
    ("gpu", "settings", "rows"),
    [
        (True, Settings(), 32),
        (True, Settings(completion_batch_size=20), 20),
        (True, Settings(num_blocks=3000), 11),
        (True, Settings(num_blocks=300), 8),
        (True, Settings(max_batch_size=4, given=frozenset({"max_batch_size"})), 4),
        (False, Settings(), 8),
    ],
)
def test_a_gpu_decodes_as_many_sequences_as_memory_holds(
    monkeypatch: pytest.MonkeyPatch, *, gpu: bool, settings: Settings, rows: int
) -> None:
    on_a_device(monkeypatch, 64 * GB, gpu=gpu)
    assert sizes_of(settings).decode_rows == rows
    assert sizes_of(settings, max_sequences=1).decode_rows == 1


@pytest.mark.parametrize(("kind", "kv_bits"), [("llama", 8), ("llama", 16), ("qwen3_next", 8)])
def test_as_many_blocks_as_were_asked_for_are_shown(
    tiny_model: Callable[..., Path], kind: str, kv_bits: int
) -> None:
    """Passes that gather pages, and states, have memory beside them."""
    whole = Whole(tiny_model(kind), num_blocks=40, block_size=16, kv_bits=kv_bits)
    stats = whole.scheduler.stats
    assert (stats().total_blocks, stats().used_blocks) == (whole.replica.num_blocks, 0) == (40, 0)
    used = []
    whole.after_step = lambda: used.append((stats().used_blocks, stats().free_blocks))
    whole.submit("a", list(range(3, 130)), 30)
    whole.run()
    assert max(used)[0] in range(8, 41) and all(sum(each) == 40 for each in used)
    whole.scheduler.clear_cache()
    assert stats().used_blocks == 0 or kind == "qwen3_next"


def test_as_many_positions_as_were_asked_for_are_not_reduced_by_gathers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_a_device(monkeypatch, 64 * GB, gpu=True)
    sizes = sizes_of(Settings(num_blocks=4), gather_token_bytes=12_000)
    assert sizes.limit_bytes == 64 * (60_000 + 12_000)


def test_a_device_that_is_too_small_for_the_smallest_pool_gives_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It uses what is left: more would make the machine swap, or fail steps later."""
    on_a_device(monkeypatch, 8 * GB, gpu=True)
    blocks = blocks_of(1, 6 * GB)
    assert memory.FEWEST_BLOCKS < blocks < memory.MIN_BLOCKS
    assert "--num-blocks" in caplog.text
    assert blocks_of(1, 7 * GB) == memory.FEWEST_BLOCKS


def test_the_smallest_memory_of_all_ranks_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_device(monkeypatch, 64 * GB, gpu=False)
    own = EngineMemory.of(Settings())
    assert own.at_most(100 * GB) == own
    small = own.at_most(16 * GB)
    assert small == EngineMemory(16 * GB, False)
    assert memory.default_num_blocks(10**6, 0, small) < memory.default_num_blocks(10**6, 0, own)


@pytest.mark.parametrize("metal", [True, False])
def test_engines_share_the_memory_that_metal_keeps_resident(
    monkeypatch: pytest.MonkeyPatch, metal: bool
) -> None:
    wired: list[int] = []
    on_a_device(monkeypatch, 64 * GB, gpu=True)
    monkeypatch.setattr(mx.metal, "is_available", lambda: metal)
    monkeypatch.setattr(mx, "set_wired_limit", wired.append)
    memory.set_limits(EngineMemory.of(Settings(engines=4)))
    assert wired == ([16 * GB] if metal else [])


def test_in_8_bits_the_same_memory_holds_more_than_twice_the_blocks(llama: Path) -> None:
    kept: list[int] = []
    num_blocks, sizes = 64, []
    for kv_bits in (16, 8):
        sizes.append(Whole(llama, kv_bits=kv_bits).executor.spec.token_bytes)
        num_blocks = num_blocks * sizes[0] // sizes[-1]
        whole = Whole(llama, num_blocks=num_blocks, kv_bits=kv_bits)
        for number in range(30):
            whole.serve(f"{number}", [3 + (number * 7 + i * i) % 300 for i in range(100)], 2)
        kept.append(len(whole.cached))
    assert 25 < kept[0] < 64 and kept[1] > 2 * kept[0]
