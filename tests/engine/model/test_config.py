"""What published configs say and leave out: context, vocabulary, rotation."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import phi3

from engine.model.context import DEFAULT_CONTEXT_LENGTH, context_length, vocabulary_size
from engine.model.load import load
from engine.model.rotation import older_names
from tests.tiny_models import VOCAB_SIZE, Kind, make_tiny

LINEAR = {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
GEMMA_3_4B = {
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "model_type": "gemma3_text",
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
}
"""It leaves out what transformers means anyway."""


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        ({"max_position_embeddings": 4096}, 4096),
        ({"n_positions": 1024}, 1024),
        ({"text_config": {"max_position_embeddings": 512}}, 512),
        ({"max_position_embeddings": None}, DEFAULT_CONTEXT_LENGTH),
        (GEMMA_3_4B, 131_072),
        ({"model_type": "mamba"}, DEFAULT_CONTEXT_LENGTH),
        ({"model_type": "no such model"}, DEFAULT_CONTEXT_LENGTH),
        # Qwen3, as its page says to lengthen the context, in the old form and in the new one.
        ({"max_position_embeddings": 40_960, "rope_scaling": YARN}, 131_072),
        ({"max_position_embeddings": 40_960, "rope_parameters": YARN}, 131_072),
        ({"text_config": {"max_position_embeddings": 40_960, "rope_scaling": YARN}}, 131_072),
        # DeepSeek V3, gpt-oss and Llama 3.1, whose configs name the stretched context.
        (
            {
                "max_position_embeddings": 163_840,
                "rope_scaling": {**YARN, "factor": 40, "original_max_position_embeddings": 4096},
            },
            163_840,
        ),
        (
            {
                "max_position_embeddings": 131_072,
                "rope_scaling": {**YARN, "rope_type": "llama3", "factor": 8.0},
            },
            131_072,
        ),
    ],
)
def test_a_context_is_as_long_as_the_config_means(config: dict[str, Any], tokens: int) -> None:
    assert context_length(config) == tokens


@pytest.mark.parametrize(("kind", "tokens"), [("qwen3", 256), ("glm4_moe", 64)])
def test_a_context_is_stretched_only_where_the_model_does_it(
    tmp_path: Path, kind: Kind, tokens: int
) -> None:
    """mlx-lm's glm4_moe ignores the field."""
    yarn = {**YARN, "factor": 4.0, "original_max_position_embeddings": 64}
    path = make_tiny(kind, tmp_path, max_position_embeddings=64, rope_scaling=yarn)
    assert load(path).context_length == tokens


def test_a_vocabulary_that_the_config_leaves_out_is_that_of_the_model() -> None:
    """The logits of Gemma 3 4B are wider than its tokenizer's vocabulary."""
    args = SimpleNamespace(vocab_size=0, text_config={"vocab_size": 262_208})
    assert vocabulary_size(SimpleNamespace(args=args), GEMMA_3_4B) == 262_208
    args = SimpleNamespace(text_config=SimpleNamespace(vocab_size=202_048))
    assert vocabulary_size(SimpleNamespace(args=args), {}) == 202_048
    assert vocabulary_size(SimpleNamespace(), {"text_config": {"vocab_size": 5}}) == 5
    assert vocabulary_size(SimpleNamespace(), {}) == 0


def test_a_config_of_newer_transformers_rotates_as_it_says(tmp_path: Path, llama: Path) -> None:
    """mlx-lm's class of Llama does not know ``rope_parameters``, and would take its defaults."""
    rotation = {"rope_theta": 500_000.0, "rope_type": "linear", "factor": 2.0}
    old = {"rope_type": "linear", "factor": 2.0}
    models = [
        make_tiny("llama", tmp_path / "old", rope_theta=500_000.0, rope_scaling=old),
        make_tiny("llama", tmp_path / "new", rope_theta=None, rope_parameters=rotation),
    ]
    tokens = mx.array([[5, 6, 7, 8] * 8])
    one, other = (load(path).model(tokens) for path in models)
    assert mx.array_equal(one, other)
    assert not mx.array_equal(one, load(llama).model(tokens))
    assert load(models[1]).vocab_size == VOCAB_SIZE


@pytest.mark.parametrize(
    ("config", "added"),
    [
        ({"rope_theta": 1e6}, {}),
        ({"rope_theta": 1e6, "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}, {}),
        (
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
        ),
        (
            {"text_config": {"a": 1, "rope_parameters": {"rope_theta": 1e4}}},
            {"text_config": {"a": 1, "rope_parameters": {"rope_theta": 1e4}, "rope_theta": 1e4}},
        ),
        (  # Gemma 3
            {
                "rope_parameters": {
                    "full_attention": LINEAR,
                    "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
                }
            },
            {
                "rope_local_base_freq": 1e4,
                "rope_theta": 1e6,
                "rope_scaling": LINEAR | {"type": "linear"},
            },
        ),
        ({"rope_parameters": "odd"}, {}),
    ],
)
def test_names_are_added_only_where_they_are_missing(
    config: dict[str, Any], added: dict[str, Any]
) -> None:
    assert older_names(config) == added


def test_a_class_that_reads_only_the_type_of_a_rotation_finds_it() -> None:
    """As that of Phi 3, which fails without."""
    rotation = {"rope_type": "longrope", "rope_theta": 1e4, "long_factor": [1], "short_factor": [1]}
    added = older_names({"rope_parameters": rotation})
    assert added["rope_scaling"]["type"] == "longrope"
    sizes = dict.fromkeys(
        ("hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads"), 8
    )
    phi3.ModelArgs("phi3", **sizes, rms_norm_eps=1e-5, vocab_size=8, **added)
