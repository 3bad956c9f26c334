"""The figures of `bench prompts`, without servers."""

from __future__ import annotations

import fcntl
import time
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.utils import load_model

from bench.prompt_times import experts
from bench.prompt_times.alone import operations
from bench.prompt_times.measuring import Options, gaps_s, texts_in
from services.measuring.answers import StreamedAnswer


def test_gaps_overlap_the_time_that_is_looked_at() -> None:
    answers = [
        StreamedAnswer(began=100.0, times=[1.0, 2.0, 4.0, 4.5, 9.0]),
        StreamedAnswer(began=101.0, times=[7.0]),
    ]
    assert gaps_s(answers, 103.0, 104.2) == [2.0, 0.5]
    assert gaps_s(answers, 105.0, 108.0) == [4.5]
    assert texts_in(answers, 102.0, 108.0) == 3


def test_operations_of_a_prompt_are_those_of_its_products_and_half_its_pairs() -> None:
    config = {
        "hidden_size": 8,
        "intermediate_size": 10,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    parameters = 8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 10
    assert operations(config, 5) == 3 * (2 * parameters * 5 + 4 * 8 * 5 * 5 / 2)


def test_measures_take_turns_with_others_that_hold_the_lock(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    seen = []

    def measure(run: int) -> float:
        with lock.open("ab") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        seen.append(run)
        return time.monotonic()

    found = Options(runs=2, lock=lock).in_turn({"a": measure, "b": measure})
    assert seen == [0, 0, 1, 1]
    assert found["a"][0] < found["b"][0] < found["b"][1] < found["a"][1]
    with lock.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_the_random_mixture_of_experts_is_a_model_of_mlx_lm(tmp_path: Path) -> None:
    small = {"num_hidden_layers": 1, "num_experts": 4, "num_experts_per_tok": 2, "vocab_size": 64}
    config = experts.CONFIG | small
    size = experts.write(tmp_path, config)
    matrices = 4 * 3 * config["hidden_size"] * config["moe_intermediate_size"]
    assert size == matrices // 2 + matrices // experts.GROUP * 2 * 2  # codes; scales and biases
    model, _ = load_model(tmp_path)
    logits = model(mx.array([[1, 2, 3]]))
    assert logits.shape == (1, 3, 64) and mx.isfinite(logits).all().item()
    assert mx.std(logits).item() > 0.01
