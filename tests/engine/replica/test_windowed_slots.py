"""Slots that keep only the window of layers with one, as on a GPU, forced on the CPU.

With chunks of 32 tokens a ring of these models has 80 positions: 32 of the window, and the rest for
a pass. Sequences are several times as long."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import mlx.core as mx
import pytest

from engine.backend.gpu_path import forced_gpu_path
from engine.cache.quantization import Precision
from tests.engine.whole import Whole, random_tokens
from tests.oracle import Oracle
from tests.tiny_models import SLIDING_WINDOW

CHUNK = 32
RING = SLIDING_WINDOW + CHUNK + 16
MODELS = [("gemma3", 16), pytest.param("gpt_oss", 8, marks=pytest.mark.slow)]


@pytest.fixture(autouse=True)
def on_a_gpu() -> Iterator[None]:
    with forced_gpu_path():
        yield


def forced(path: Path, num_blocks: int, kv_bits: int) -> Whole:
    whole = Whole(path, num_blocks=num_blocks, kv_bits=kv_bits, prefill_chunk_tokens=CHUNK)
    assert [ring.tokens for ring in whole.executor.spec.rings] == [RING]
    whole.renew_with_store()
    return whole


@pytest.mark.parametrize(("kind", "kv_bits"), MODELS)
def test_texts_are_right_turn_after_turn(
    tiny_model: Callable[..., Path], kind: str, kv_bits: int
) -> None:
    """Conversations go on from cached blocks, and from the kvstore in a new engine."""
    path = tiny_model(kind)
    whole = forced(path, 4096, kv_bits)
    oracle = Oracle(path, rounded=Precision(kv_bits))
    shared = random_tokens(1, 130)
    talks = {f"r{n}": shared[: 130 * (n % 2)] + random_tokens(n, 20 + 60 * n) for n in range(3)}
    for turn in range(3):
        if turn == 2:
            whole.renew_with_store(whole.stored)
        for number, (name, tokens) in enumerate(talks.items()):
            whole.submit(name, tokens, 14 + 3 * number)
            whole.turn()
        whole.run()
        stats = whole.scheduler.stats()
        known = stats.cached_ssd_tokens_total if turn == 2 else stats.cached_ram_tokens_total
        assert (known > 300) == (turn > 0)
        for name, tokens in talks.items():
            text = whole.texts[name]
            oracle.check_same(tokens, text, oracle.greedy(tokens, len(text)))
            talks[name] = [*tokens, *text, *random_tokens(turn, 40)]


@pytest.mark.parametrize(("kind", "kv_bits"), MODELS)
def test_preempted_sequences_go_on_from_blocks(
    tiny_model: Callable[..., Path], kind: str, kv_bits: int
) -> None:
    path = tiny_model(kind)
    whole = forced(path, 40 if kv_bits == 16 else 80, kv_bits)
    prompts = {f"r{n}": random_tokens(n, 90 + 40 * n) for n in range(4)}
    for name, tokens in prompts.items():
        whole.submit(name, tokens, 60)
    worst = 0
    while not whole.scheduler.idle:
        whole.turn()
        mx.synchronize()
        worst = max(worst, whole.kept_bytes - whole.scheduler.memory.ledger.used_bytes)
    stats = whole.scheduler.stats()
    assert stats.preemptions_total > 0
    # Index arrays of writes and tables of sampling.
    assert worst < 0.15 * whole.scheduler.memory.ledger.limit_bytes
    oracle = Oracle(path, rounded=Precision(kv_bits))
    for name, tokens in prompts.items():
        oracle.check_same(tokens, whole.texts[name], oracle.greedy(tokens, 60))


def test_long_slots_take_less_memory_and_the_ledger_says_how_much(
    tiny_model: Callable[..., Path],
) -> None:
    whole = forced(tiny_model("gemma3"), 4096, 16)
    config = whole.scheduler.config
    tokens = random_tokens(1, 1900)
    whole.submit("long", tokens, 2)
    whole.turn_until(lambda: whole.texts["long"])
    mx.synchronize()
    (slab,) = whole.executor._slabs.values()  # type: ignore[attr-defined]
    lengths = {array.shape[2] for array in slab.arrays}
    assert lengths == {RING, slab.capacity}
    slab_bytes = sum(array.nbytes for array in slab.arrays)
    whole_bytes = slab.rows * slab.capacity // config.block_size * config.slot_block_bytes
    charged_bytes = config.slab_bytes(slab.rows, slab.capacity)
    assert slab_bytes <= charged_bytes < 0.75 * whole_bytes
    # What is charged beyond the slab is the copy of one array while the slab grows.
    largest_bytes = max(array.nbytes for array in slab.arrays)
    assert charged_bytes - slab_bytes <= largest_bytes
