"""Checkpoints with pictures: their families, and the names of their weights."""

from __future__ import annotations

import pytest

from engine.model.multimodal import (
    FAMILIES,
    _text_name,
    deep_layers,
    serves_pictures,
    takes_pictures,
    text_classes,
)
from tests.vision_models import FAMILIES as TRIED


def test_every_family_that_is_served_is_tried_beside_mlx_vlm() -> None:
    assert list(FAMILIES) == list(TRIED)
    for name, family in FAMILIES.items():
        assert family.placeholder == TRIED[name].placeholder


def test_weights_of_the_language_model_are_found_under_all_their_names() -> None:
    names = {
        "model.text_model.layers.0.mlp.up_proj.weight": "model.layers.0.mlp.up_proj.weight",
        "language_model.layers.0.mlp.up_proj.weight": "model.layers.0.mlp.up_proj.weight",
        "language_model.model.norm.weight": "model.norm.weight",
        "language_model.lm_head.weight": "lm_head.weight",
        "lm_head.weight": "lm_head.weight",
        "model.vision_model.encoder.layers.0.mlp.fc1.weight": "",
        "connector.modality_projection.proj.weight": "",
    }
    assert {name: _text_name(name) for name in names} == names


def test_what_a_config_says_of_pictures() -> None:
    assert not takes_pictures({"model_type": "llama"})
    assert not takes_pictures({"vision_config": None})
    assert takes_pictures({"vision_config": {"depth": 2}})
    assert not serves_pictures({"model_type": "gemma3n", "vision_config": {"depth": 2}})
    assert not serves_pictures({"model_type": "gemma3"})
    assert serves_pictures({"model_type": "gemma3", "vision_config": {"depth": 2}})
    assert deep_layers({"vision_config": {"deepstack_visual_indexes": [1, 2]}}) == 2
    assert deep_layers({"vision_config": "odd"}) == deep_layers({}) == 0


@pytest.mark.parametrize(
    ("family", "named", "module"),
    [
        ("internvl", "qwen2", "qwen2"),
        ("internvl", "unheard_of", "qwen3"),
        ("idefics3", "mistral", "llama"),
        ("glm4v_moe", "glm4v_moe_text", "glm4_moe"),
        ("kimi_vl", "deepseek_v3", "deepseek_v3"),
    ],
)
def test_the_language_model_is_what_the_config_says(family: str, named: str, module: str) -> None:
    classes = text_classes({"model_type": family, "text_config": {"model_type": named}})
    assert classes is not None
    _, args = classes({"model_type": family, "text_config": {"model_type": named}})
    assert args._args_class.__module__ == f"mlx_lm.models.{module}"


def test_rotations_are_read_where_newer_configs_have_them() -> None:
    rope = {"rope_theta": 123.0, "rope_type": "default", "partial_rotary_factor": 0.25}
    text = {
        "model_type": "glm4v_text", "hidden_size": 64, "num_hidden_layers": 2,
        "intermediate_size": 96, "num_attention_heads": 4, "attention_bias": True,
        "rms_norm_eps": 1e-5, "vocab_size": 32, "rope_theta": None, "rope_parameters": rope,
    }  # fmt: skip
    config = {"model_type": "glm4v", "text_config": text}
    classes = text_classes(config)
    assert classes is not None
    args = classes(config)[1].from_dict(config)
    assert (args.rope_theta, args.partial_rotary_factor) == (123.0, 0.25)
    assert (args.head_dim, args.num_key_value_heads) == (16, 4)
