"""What divides between ranks, and what a rank keeps of the weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from engine.model import load
from engine.model.errors import ModelUnavailable
from engine.model.sharding import indivisible, max_ranks
from services.ranks.group import divided
from shared.settings import Settings
from tests.tiny_models import make_tiny

DEMO = {
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_size": 576,
    "intermediate_size": 1536,
}


class OneOf:
    """Stands for a group while nothing is exchanged."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def model(folder: Path, **config: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("changes", "ranks", "reason"),
    [
        ({}, 3, None),
        ({}, 2, "9 attention heads are not divisible by 2"),
        ({"num_attention_heads": 12}, 4, "3 KV heads are not divisible by 4"),
        ({"num_attention_heads": 12, "kv_lora_rank": 64}, 4, None),
        ({"intermediate_size": 1540}, 3, "1540 columns of its MLP are not divisible by 3"),
        ({"quantization": {"group_size": 32, "bits": 4}}, 3, None),
        ({"quantization": {"group_size": 128, "bits": 4}}, 9, "3 KV heads are not divisible by 9"),
        (
            {"quantization": {"group_size": 64, "bits": 4}, "intermediate_size": 1600},
            3,
            "1600 columns of its MLP are not divisible by 3 in groups of 64",
        ),
    ],
)
def test_what_does_not_divide_is_named(
    tmp_path: Path, changes: dict[str, Any], ranks: int, reason: str | None
) -> None:
    assert indivisible(model(tmp_path, **DEMO | changes), ranks) == reason


def test_heads_of_the_text_part_count(tmp_path: Path) -> None:
    assert indivisible(model(tmp_path, text_config=DEMO), 2) is not None


def test_the_most_ranks_that_divide_are_found(tmp_path: Path) -> None:
    path = model(tmp_path, **DEMO)
    assert [max_ranks(path, ranks) for ranks in (1, 2, 3, 4, 8)] == [1, 1, 3, 3, 3]


def test_strict_ranks_refuse_and_others_start_fewer(tmp_path: Path) -> None:
    path = model(tmp_path, **DEMO)
    four: dict[str, Any] = {"model": "m", "distributed_mode": "ring", "num_local_ranks": 4}
    with pytest.raises(ModelUnavailable, match=r"across 4 ranks: 9 attention heads .* Use 3 ranks"):
        divided(Settings(**four), path)
    fewer = Settings(**four, distributed_strict=False)
    assert divided(fewer, path).ranks == 3
    assert "num_local_ranks" in divided(fewer, path).given


def test_a_model_that_mlx_lm_cannot_divide_is_refused_before_it_is_loaded(
    llama: Path, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    load.check_divisible(llama, "llama")
    config = (tiny_model("gemma3") / "config.json").read_text()
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ModelUnavailable, match="does not support it for gemma3_text"):
        load.check_divisible(tmp_path, "it")  # without any weights


def test_a_loaded_model_that_mlx_lm_cannot_divide_is_refused(
    tiny_model: Callable[..., Path],
) -> None:
    with pytest.raises(ModelUnavailable, match="does not support it for gemma3_text"):
        load.load(tiny_model("gemma3"), group=cast(mx.distributed.Group, OneOf(0, 2)))


def test_a_rank_holds_its_part_and_one_array_more_at_most(tmp_path: Path) -> None:
    path = make_tiny("llama", tmp_path / "wide", hidden_size=256, intermediate_size=8192)
    mx.clear_cache()
    whole = sum(a.nbytes for _, a in tree_flatten(load.load(path).model.parameters()))
    parts = []
    for rank in range(2):
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        loaded = load.load(path, group=cast(mx.distributed.Group, OneOf(rank, 2)))
        kept = sum(array.nbytes for _, array in tree_flatten(loaded.model.parameters()))
        largest = 256 * 8192 * 4
        assert mx.get_active_memory() - before <= 1.02 * kept
        assert mx.get_peak_memory() - before <= kept + 2 * largest
        parts.append(kept)
        del loaded
    assert parts[0] == parts[1] and parts[0] < 0.55 * whole
