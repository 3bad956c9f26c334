"""The models that README.md and docs/agents.md name for Macs of some sizes."""

from __future__ import annotations

import mlx.core as mx
import pytest

from engine.replica.memory import EngineMemory
from tests.engine.scheduler.device import Device
from tests.model_choices import (
    AGENT_MEMORY_GB,
    CHAT_KV_BITS,
    KV_BITS,
    MEMORY_GB,
    SHORT_TOKENS,
    Model,
    models,
    room_bytes,
)

PUBLISHED_BILLIONS = [1.72, 4.0, 8.2, 20.9, 23.6, 30.5, 79.7, 107, 117, 235, 671]


def test_the_shapes_give_the_published_parameters_and_more_memory_a_longer_context() -> None:
    found = list(models())
    assert [each.parameters / 1e9 for each in found] == pytest.approx(PUBLISHED_BILLIONS, rel=0.01)
    for model in found:
        for bits in KV_BITS:
            tokens = [model.tokens(memory, bits) for memory in MEMORY_GB]
            assert tokens == sorted(tokens) and tokens[-1] > 32_768
        by_bits = [model.tokens(32, bits) for bits in KV_BITS]
        assert by_bits == sorted(by_bits) and max(by_bits) <= model.context


def test_the_room_on_a_mac_is_the_engines_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    for working_set, weights in ((10 << 30, 3 << 30), (96 << 30, 60 << 30), (10 << 30, 12 << 30)):
        own = EngineMemory(working_set, is_budget=False)
        assert room_bytes(working_set, weights) == own.room_bytes(weights)


DESIGNED = {
    (16, "Qwen3-1.7B"): (40_960, 8),
    (16, "Qwen3-4B-Instruct-2507"): (51_008, 5),
    (32, "Qwen3-4B-Instruct-2507"): (128_832, 14),
    (32, "Devstral-Small-2507"): (49_600, 5),
    (32, "Qwen3-Coder-30B-A3B"): (42_752, 4),
    (64, "Devstral-Small-2507"): (131_072, 25),
    (64, "Qwen3-Coder-30B-A3B"): (262_144, 37),
    (128, "GLM-4.5-Air"): (131_072, 24),
    (128, "Qwen3-Coder-30B-A3B"): (262_144, 97),
    # Layers with a window keep all positions. If they kept only the window: 34 and 96 at once.
    (32, "gpt-oss-20b"): (131_072, 20),
    (128, "gpt-oss-120b"): (131_072, 58),
    # What the states of unused slots would take is room for pages. Otherwise: 81,933 and 11.
    (64, "Qwen3-Next-80B-A3B"): (201_024, 18),
}
"""The longest conversation with 8-bit KV on a Mac, and how many of 10,240 tokens fit at once."""


def test_macs_hold_what_pages_were_designed_for() -> None:
    by_name = {model.name: model for model in models()}
    for (memory_gb, name), (longest, at_once) in DESIGNED.items():
        model = by_name[name]
        assert model.tokens(memory_gb, CHAT_KV_BITS) == pytest.approx(longest, rel=0.05)
        assert model.at_once(memory_gb, CHAT_KV_BITS) == pytest.approx(at_once, rel=0.05)


ROWS = [(gb, model) for gb in AGENT_MEMORY_GB for model in models()]


@pytest.mark.parametrize(
    ("memory_gb", "model"),
    [row for row in ROWS if row[1].tokens(row[0], CHAT_KV_BITS) >= SHORT_TOKENS],
    ids=lambda value: value.name if isinstance(value, Model) else f"{value} GB",
)
def test_the_second_turn_of_the_longest_conversation_finds_the_first(
    memory_gb: int, model: Model
) -> None:
    config = model.config(memory_gb, CHAT_KV_BITS)
    assert config is not None
    device = Device(config, token_s=1e-6)
    text = list(range(1000, 1000 + model.tokens(memory_gb, CHAT_KV_BITS)))
    first = len(text) - 1000
    assert device.serve("first", text[:first], max_tokens=30).completion_tokens == 30
    second = device.serve("second", text[:-30], max_tokens=30)
    assert first - second.cached_ram_tokens < 2 * config.page_tokens
    assert device.scheduler.stats().preemptions_total == 0
