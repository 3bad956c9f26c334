"""What fits into the memory of a Mac: long conversations, many of them, and agents with a common
prompt. The scheduler is the real one, at the sizes of real models; nothing is computed."""

from __future__ import annotations

from typing import Any

import pytest

from engine.scheduler import SchedulerConfig
from tests.engine.scheduler.device import Device

GIB = 2**30


def mac(
    memory_gb: int,
    weights_bytes: float,
    layers: int,
    kv_heads: int,
    activations: int,
    context: int = 262_144,
    **changes: Any,
) -> SchedulerConfig:
    """Return the configuration for a model with heads of 128 and a KV cache of 8 bits on a Mac:
    60 % of what the weights leave of two thirds, or from 36 GB on three quarters, of its memory."""
    working_set = memory_gb * GIB * (2 / 3 if memory_gb < 36 else 3 / 4)
    block_bytes = 16 * layers * kv_heads * 2 * (128 + 4)
    fields: dict[str, Any] = {
        "block_size": 16,
        "block_bytes": block_bytes,
        "limit_bytes": int((working_set - weights_bytes - 1.5 * GIB) * 0.6),
        "gather_token_bytes": 3 * kv_heads * 2 * 128 * 2,
        "context_length": context,
        "max_batch_size": 32,
        "prefill_batch_size": 4,
        "completion_batch_size": 32,
        "namespace": bytes(16),
        "look_ahead": True,
        "layers": layers,
        "max_chunk_tokens": 2048,
        "pass_token_bytes": activations,
    }
    return SchedulerConfig(**fields | changes)


def qwen3_4b(memory_gb: int = 16, **changes: Any) -> SchedulerConfig:
    return mac(memory_gb, 2.3e9, 36, 8, 4 * (6 * 2560 + 3 * 9728), **changes)


def qwen3_coder(memory_gb: int = 32) -> SchedulerConfig:
    return mac(memory_gb, 17.2e9, 48, 4, 122_880, max_chunk_tokens=8192, has_experts=True)


def devstral(memory_gb: int = 32) -> SchedulerConfig:
    return mac(memory_gb, 13.3e9, 40, 8, 4 * (6 * 5120 + 3 * 32768), 131_072)


TEXT = list(range(1000, 60_000))
TURNS = (6000, 7000, 8500, 9500, 12_000, 13_000, 16_500, 24_000, 32_000, 40_000, 48_000)


@pytest.mark.parametrize(
    ("settings", "longest"),
    [(qwen3_4b(), 48_000), (qwen3_coder(), 40_000), (devstral(), 48_000)],
    ids=["4B on 16 GB", "30B-A3B on 32 GB", "24B on 32 GB"],
)
def test_each_turn_of_a_conversation_finds_the_one_before(
    settings: SchedulerConfig, longest: int
) -> None:
    device, known = Device(settings), 0
    for length in (turn for turn in TURNS if turn <= longest):
        usage = device.serve(f"{length}", TEXT[:length])
        assert known - usage.cached_ram_tokens < settings.page_tokens
        known = length
    assert device.scheduler.stats().preemptions_total == 0


def test_nineteen_chats_run_at_once_on_16_gb() -> None:
    device = Device(qwen3_4b(), token_s=1e-6)
    for number in range(19):
        device.submit(f"{number}", [number, *TEXT[:2999]])
    device.run()
    assert device.most_running == 19 and device.most_pages >= 19 * (3000 // 64)
    assert len(device.usages) == 19 and device.scheduler.stats().preemptions_total == 0


def test_agents_with_a_common_prompt_hold_it_once() -> None:
    device = Device(qwen3_4b(), token_s=1e-6)
    for number in range(8):
        device.submit(f"{number}", [*TEXT[:10_000], *[number] * 500], max_tokens=60)
    device.run()
    assert device.most_running == 8 and len(device.usages) == 8
    assert 14_000 <= device.most_pages * 64 <= 15_104
    # The first one computes the common prompt, and each its own end and a part of a page.
    assert device.computed <= 10_500 + 7 * (500 + 64)


@pytest.mark.parametrize(
    ("settings", "lengths"),
    [
        (qwen3_4b(), (9000, 3000)),
        (qwen3_coder(), (9000, 3000)),
        (qwen3_coder(64), (40_000, 40_000)),
        (devstral(64), (40_000, 40_000)),
    ],
    ids=["4B on 16 GB", "30B-A3B on 32 GB", "30B-A3B on 64 GB", "24B on 64 GB"],
)
def test_two_conversations_run_together(
    settings: SchedulerConfig, lengths: tuple[int, int]
) -> None:
    device = Device(settings, token_s=1e-6)
    for name, length in zip("ab", lengths, strict=True):
        device.submit(name, [ord(name), *TEXT[: length - 1]])
    device.run()
    assert device.most_running == 2 and device.most_pages >= sum(lengths) // 64
    assert device.scheduler.stats().preemptions_total == 0


def test_pressure_is_what_running_sequences_use() -> None:
    device = Device(qwen3_4b(pass_token_bytes=0))
    config = device.scheduler.config
    device.submit("a", TEXT[:9000])
    device.run()
    assert device.most_used_bytes == -(-9059 // 64) * config.page_bytes
    assert device.scheduler.stats().unevictable_bytes == 0, "at once after the answer"


def test_no_token_of_a_prompt_is_computed_twice_as_answers_grow() -> None:
    for settings in (qwen3_4b(), qwen3_coder()):
        device = Device(settings)
        device.submit("a", TEXT[:8000], max_tokens=400)
        device.submit("b", TEXT[100:2100], max_tokens=1200)
        device.run()
        stats = device.scheduler.stats()
        assert (device.computed, stats.preemptions_total) == (7999 + 1999, 0)


def test_an_answer_is_cut_to_what_fits() -> None:
    device = Device(qwen3_4b())
    capacity = device.scheduler.config.capacity
    usage = device.serve("a", TEXT[: capacity - 100], max_tokens=32_000)
    assert usage.completion_tokens == 100 and not device.refusals
    device.submit("b", TEXT[:capacity])
    device.run()
    (refused,) = device.refusals
    assert (refused.reason, refused.param) == ("too_large", "prompt")


def test_what_left_memory_comes_back_from_the_kvstore() -> None:
    fields: dict[str, Any] = {"store_enabled": True, "store_policy": "write_through"}
    device = Device(qwen3_4b(**fields))
    device.serve("a", TEXT[:10_500])
    for number in range(6):
        device.serve(f"{number}", [number, *TEXT[:9999]])
    usage = device.serve("again", TEXT[:10_500])
    assert usage.cached_ram_tokens + usage.cached_ssd_tokens > 10_500 - 2 * 64
    assert usage.cached_ssd_tokens > 1000
