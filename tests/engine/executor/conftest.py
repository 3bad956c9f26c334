"""Tiny models, and the kinds of batches that compute them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from engine.batch import ragged
from engine.batch.gpu import GPUBatch
from engine.batch.graph import GraphBatch
from engine.cpu.attention.host_batch import HostBatch
from engine.cpu.decoder.decoder import DecoderBatch
from tests.engine.executor.by_hand import Runner, load
from tests.tiny_models import Kind

Pair = tuple[Kind, type[ragged.RaggedBatch]]
KINDS: tuple[Kind, ...] = ("llama", "gemma3", "gpt_oss")
EACH_ONCE: list[Pair] = [
    ("gpt_oss", GraphBatch),
    ("gemma3", GPUBatch),
    ("llama", HostBatch),
    ("gpt_oss", DecoderBatch),
]
EVERY = [*product(KINDS, (GraphBatch, GPUBatch, HostBatch, DecoderBatch))]


def name_of(pair: Pair) -> str:
    return f"{pair[0]}-{pair[1].__name__}"


every_pair = pytest.mark.parametrize("pair", EVERY, ids=name_of, indirect=True)


@pytest.fixture(params=EACH_ONCE, ids=name_of)
def pair(request: pytest.FixtureRequest) -> Pair:
    """A kind of models and of batches. ``every_pair`` asks for all of them."""
    found: Pair = request.param
    return found


@pytest.fixture
def model(pair: Pair, tiny_model: Callable[..., Path]) -> Any:
    return load(tiny_model(pair[0], seed=1))


@pytest.fixture
def batch_class(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> type[ragged.RaggedBatch]:
    monkeypatch.setattr(Runner, "batch_class", pair[1], raising=False)
    return pair[1]
