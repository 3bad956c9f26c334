"""The models that README.md and docs/agents.md name for Macs of some sizes."""

from __future__ import annotations

import mlx.core as mx
import pytest

from engine.replica.memory import EngineMemory
from tests.model_choices import KV_BITS, MEMORY_GB, models, room_bytes

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
