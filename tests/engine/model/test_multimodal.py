"""Checkpoints with pictures: their families, and the names of their weights."""

from __future__ import annotations

from engine.model.multimodal import FAMILIES, _text_name, deep_layers, takes_pictures
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
    assert deep_layers({"vision_config": {"deepstack_visual_indexes": [1, 2]}}) == 2
    assert deep_layers({"vision_config": "odd"}) == deep_layers({}) == 0
