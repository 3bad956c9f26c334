"""Tiny models, and the kinds of batches that compute them."""

from __future__ import annotations

from typing import Any

import pytest

from engine.batch import ragged
from engine.batch.cpu.decoder import DecoderBatch
from engine.batch.cpu.host import HostBatch
from engine.batch.gpu import GPUBatch
from engine.batch.graph import GraphBatch
from tests.engine.executor.by_hand import Runner, load


@pytest.fixture(scope="module", params=["llama", "gemma3", "gpt_oss"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(params=[GraphBatch, GPUBatch, HostBatch, DecoderBatch])
def batch_class(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> type[ragged.RaggedBatch]:
    monkeypatch.setattr(Runner, "batch_class", request.param, raising=False)
    return request.param
