"""Proofs of models whose activations are rounded to 8 bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn

from engine import device
from engine.cpu.layers import Layers
from engine.executor.batched import BatchedExecutor
from engine.executor.serial import SerialExecutor
from engine.proving import choose, proof
from engine.proving.choose import choose_executor
from engine.proving.trial import Trial
from tests.engine.conftest import Wrap
from zoo.build import build
from zoo.common import VOCAB_SIZE

pytestmark = pytest.mark.skipif(mx.default_device() == mx.gpu, reason="for CPUs")


def fast(name: str) -> Any:
    device.prepare()
    model = build(name)
    nn.quantize(model, 32, 4, class_predicate=lambda _, m: hasattr(m, "to_quantized"))
    mx.eval(model.parameters())
    Layers(model, "fast", dense=False)
    return model


@pytest.fixture
def differences(wrap: Wrap) -> list[float]:
    """Return the distances that proofs find, in turn: of exact products, then of fast ones."""
    found: list[float] = []

    @wrap(Trial, "run_short")
    def noted(run_short: Callable[..., None], trial: Trial, references: Any) -> None:
        run_short(trial, references)
        found.append(trial.max_difference)

    return found


@pytest.mark.parametrize("name", ["qwen3_moe", "mamba2"])
def test_the_same_codes_are_proven_closely_first(name: str, differences: list[float]) -> None:
    model = fast(name)
    executor = choose_executor(model, VOCAB_SIZE, 16).executor
    assert isinstance(executor, BatchedExecutor)
    assert device.rounds_activations(model)  # what is served
    assert len(differences) == 2
    assert differences[0] <= proof.TOLERANCE


@pytest.mark.parametrize(("factor", "batched"), [(0.9, True), (1.1, False)])
def test_fast_batches_differ_by_no_more_than_two_roundings(
    factor: float, batched: bool, wrap: Wrap
) -> None:
    model = fast("llama")
    bounds: list[float] = []

    @wrap(choose, "rounding_of_activations")
    def noted(bound: Callable[..., float], *given: Any) -> float:
        bounds.append(bound(*given))
        return bounds[0]

    @wrap(Trial, "run_short")
    def at_the_bound(run_short: Callable[..., None], trial: Trial, references: Any) -> None:
        run_short(trial, references)
        if bounds:
            trial.max_difference = factor * bounds[0]

    found = choose_executor(model, VOCAB_SIZE, 16)
    assert 1e-3 < bounds[0] < proof.MAX_ROUNDING
    assert isinstance(found.executor, BatchedExecutor if batched else SerialExecutor)
    assert ("logits differ" in found.reason) != batched
