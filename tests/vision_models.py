"""Tiny random models that take pictures, made from mlx-vlm's own classes, as model directories.

They are what `tests.tiny_models` are among models of text. Tests that use them need mlx-vlm, which
`make setup` installs (requirements/vision.txt).
"""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map
from PIL import Image
from tokenizers import AddedToken

from tests.tiny_models import CONTEXT, EOS, VOCAB_SIZE, byte_tokenizer, tokenizer_config

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}IMAGE"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "max_position_embeddings": CONTEXT,
}
_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
}
_DEEP_TOWER = {"depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2}
_MERGED_PATCHES = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
_FEW_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_ROUTED_EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}

_TILE_TOKENS = (
    "<fake_token_around_image>",
    "<global-img>",
    "<end_of_utterance>",
    *(f"<row_{row}_col_{col}>" for row in range(1, 4) for col in range(1, 4)),
)
_TILES = {
    "do_image_splitting": True,
    "size": {"longest_edge": 32},
    "max_image_size": {"longest_edge": 16},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
_PATCHES = {
    "image_processor_type": "PixtralImageProcessor",
    "patch_size": 4,
    "size": {"longest_edge": 32},
}


@dataclass(frozen=True)
class VisionFamily:
    """What a kind of model needs beside its text config."""

    text: dict[str, Any]
    tower: dict[str, Any]
    placeholder: str
    tokens: tuple[str, ...]  # special tokens after the placeholder, which has id `VOCAB_SIZE`
    config: dict[str, Any] = field(default_factory=dict)
    processor: dict[str, Any] = field(default_factory=dict)  # processor_config.json
    preprocessor: dict[str, Any] = field(default_factory=dict)  # preprocessor_config.json
    tokenizer: dict[str, Any] = field(default_factory=dict)  # more of tokenizer_config.json
    flat: bool = False  # whether the text config is the outer one
    scale: int = 1  # how many times larger than `picture` makes them pictures have to be
    tied: bool = False  # whether logits come from the embeddings, and no checkpoint has others
    around: tuple[str, str] = ("", "")  # what chat templates put around the placeholder


def _tiled(tower_type: str, processor: str) -> VisionFamily:
    """Return a family that divides pictures into tiles, of which each has a part of the prompt."""
    return VisionFamily(
        text=_TEXT | {"model_type": "llama", "tie_word_embeddings": False},
        tower=_TOWER | {"model_type": tower_type, "patch_size": 4, "image_size": 16},
        placeholder="<image>",
        tokens=_TILE_TOKENS,
        config={"scale_factor": 2, "image_token_id": VOCAB_SIZE},
        processor={"image_seq_len": 4},
        preprocessor=_TILES | {"image_processor_type": processor},
    )


def _mistral(text: dict[str, Any], merge: dict[str, int]) -> VisionFamily:
    return VisionFamily(
        text=_TEXT | {"model_type": "mistral", "head_dim": 16} | text,
        tower=_TOWER | {"model_type": "pixtral", "patch_size": 4, "image_size": 32, "head_dim": 16},
        placeholder="[IMG]",
        tokens=("[IMG_BREAK]", "[IMG_END]"),
        config={"image_token_index": VOCAB_SIZE} | merge,
        processor={"patch_size": 4} | merge,
        preprocessor=_PATCHES,
    )


def _image_tokens(before: str, placeholder: str, after: str) -> dict[str, Any]:
    """Return what a tokenizer's config says about the tokens around pictures."""
    tokens = {"boi_token": before, "image_token": placeholder, "eoi_token": after}
    return {"extra_special_tokens": tokens}


def _qwen(tower: dict[str, Any]) -> VisionFamily:
    """Return a family whose positions have three axes."""
    ids = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    return VisionFamily(
        text=_TEXT
        | {
            "tie_word_embeddings": False,
            "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
        },
        tower=tower
        | {"patch_size": 4, "spatial_patch_size": 4, "spatial_merge_size": 2}
        | {"temporal_patch_size": 2, "in_channels": 3},
        placeholder="<|image_pad|>",
        tokens=("<|video_pad|>", "<|vision_start|>", "<|vision_end|>"),
        config={name: VOCAB_SIZE + number for number, name in enumerate(ids)},
        preprocessor=_MERGED_PATCHES
        | {"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 64, "max_pixels": 4096},
        flat=True,
        around=("<|vision_start|>", "<|vision_end|>"),
    )


def _qwen3(text: dict[str, Any]) -> VisionFamily:
    """Return a family whose pictures have features for several layers too."""
    deep = {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
    made = _qwen(_DEEP_TOWER | {"out_hidden_size": 64} | deep)
    rope = {"type": "default", "mrope_section": [3, 3, 2], "mrope_interleaved": True}
    of_text = {"num_hidden_layers": 4, "head_dim": 16, "rope_scaling": rope, **text}
    return replace(made, text=made.text | of_text, flat=False)


_HYBRID = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "full_attention_interval": 2,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {
        "type": "default",
        "mrope_section": [2, 1, 1],
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.5,
    },
}


def _qwen3_5(kind: str, more: dict[str, Any]) -> VisionFamily:
    """Return a family of recurrent layers and others, whose positions have three axes."""
    made = _qwen3(_HYBRID | more)
    text = {name: made.text[name] for name in made.text if name != "rope_scaling"}
    tower = {**made.tower, "deepstack_visual_indexes": [], "model_type": kind}
    return replace(made, text=text, tower=tower)


def _glm(kind: str, text: dict[str, Any]) -> VisionFamily:
    names = ("<|video|>", "<|begin_of_image|>", "<|end_of_image|>")
    ids = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    made = _qwen({})
    rope = {"type": "default", "mrope_section": [1, 1, 2], "rope_type": "default"}
    return replace(
        made,
        text=_TEXT
        | {"rope_scaling": rope, "partial_rotary_factor": 0.5, "attention_bias": True}
        | text,
        tower=_DEEP_TOWER
        | {"model_type": kind, "patch_size": 4, "image_size": 32, "out_hidden_size": 64},
        placeholder="<|image|>",
        tokens=(*names, "<|begin_of_box|>", "<|end_of_box|>"),
        config={name: VOCAB_SIZE + number for number, name in enumerate(ids)},
        preprocessor=_MERGED_PATCHES
        | {
            "image_processor_type": "Glm4vImageProcessor",
            "size": {"shortest_edge": 128, "longest_edge": 8192},
        },
        flat=False,
        around=("<|begin_of_image|>", "<|end_of_image|>"),
    )


_GLM_EXPERTS = _ROUTED_EXPERTS | {
    "head_dim": 16,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "use_qk_norm": False,
    "tie_word_embeddings": False,
}

FAMILIES: dict[str, VisionFamily] = {
    "idefics3": _tiled("idefics3", "Idefics3ImageProcessor"),
    "smolvlm": _tiled("smolvlm_vision", "SmolVLMImageProcessor"),
    "llava": VisionFamily(
        text=_TEXT | {"model_type": "llama"},
        tower=_TOWER | {"model_type": "clip_vision_model", "patch_size": 4, "image_size": 16},
        placeholder="<image>",
        tokens=(),
        config={"image_token_index": VOCAB_SIZE, "vision_feature_layer": -2},
        processor={
            "patch_size": 4,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
        preprocessor={
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": 16},
            "crop_size": {"height": 16, "width": 16},
        },
    ),
    "pixtral": _mistral({}, {}),
    "mistral3": _mistral(
        {"rope_parameters": {"rope_theta": 10_000.0, "rope_type": "default"}},
        {"spatial_merge_size": 2},
    ),
    "internvl": VisionFamily(
        text=_TEXT | {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": False},
        tower=_TOWER | {"model_type": "internvl_vision", "patch_size": 4, "image_size": 16},
        placeholder="<IMG_CONTEXT>",
        tokens=("<img>", "</img>"),
        config={"image_token_id": VOCAB_SIZE, "downsample_ratio": 0.5, "max_dynamic_patch": 4},
        processor={"image_seq_length": 4},
    ),
    "qwen2_vl": _qwen({"depth": 3, "embed_dim": 32, "hidden_size": 64, "num_heads": 2}),
    "qwen2_5_vl": _qwen(
        _DEEP_TOWER | {"out_hidden_size": 64, "window_size": 16, "fullatt_block_indexes": [1]}
    ),
    "qwen3_vl": _qwen3({}),
    "qwen3_vl_moe": _qwen3(
        _FEW_EXPERTS | {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}
    ),
    "qwen3_5": _qwen3_5("qwen3_5", {}),
    "qwen3_5_moe": _qwen3_5("qwen3_5_moe", _FEW_EXPERTS | {"shared_expert_intermediate_size": 32}),
    "glm4v": _glm("glm4v", {"head_dim": 16}),
    "glm4v_moe": _glm("glm4v_moe", _GLM_EXPERTS),
    "gemma3": VisionFamily(
        text=_TEXT
        | {"head_dim": 16, "query_pre_attn_scalar": 16, "num_hidden_layers": 4}
        | {"rope_theta": 1e6, "rope_global_base_freq": 1e6}
        | {"sliding_window": 32, "sliding_window_pattern": 2, "mm_tokens_per_image": 16},
        tower=_TOWER | {"model_type": "siglip_vision_model", "patch_size": 4, "image_size": 32},
        placeholder="<start_of_image>",
        tokens=("<image_soft_token>", "<end_of_image>"),
        config={"image_token_index": VOCAB_SIZE + 1, "hidden_size": 64},
        tied=True,
        processor={"image_seq_length": 16},
        preprocessor={
            "image_processor_type": "Gemma3ImageProcessor",
            "size": {"height": 32, "width": 32},
        },
        tokenizer=_image_tokens("<start_of_image>", "<image_soft_token>", "<end_of_image>"),
    ),
    "gemma4": VisionFamily(
        text=_TEXT
        | {"model_type": "gemma4_text", "head_dim": 16, "num_hidden_layers": 6}
        | {"num_kv_shared_layers": 2, "global_head_dim": 32, "sliding_window": 32}
        | {"hidden_size_per_layer_input": 16, "use_bidirectional_attention": "vision"}
        | {"layer_types": ["sliding_attention", "full_attention"] * 3}
        | {
            "rope_parameters": {
                "full_attention": {
                    "partial_rotary_factor": 0.25,
                    "rope_theta": 1_000_000.0,
                    "rope_type": "proportional",
                },
                "sliding_attention": {"rope_theta": 10_000.0, "rope_type": "default"},
            }
        },
        tower=_TOWER
        | {"model_type": "gemma4_vision", "patch_size": 4, "head_dim": 16, "global_head_dim": 16}
        | {"num_key_value_heads": 2, "position_embedding_size": 64, "pooling_kernel_size": 2}
        | {"default_output_length": 40},
        placeholder="<|image|>",
        tokens=("<|image>", "<image|>", "<|video|>"),
        config={"image_token_id": VOCAB_SIZE, "audio_token_id": -1, "video_token_id": -1},
        processor={
            "image_processor": {"patch_size": 4, "max_soft_tokens": 40, "pooling_kernel_size": 2}
        },
        tokenizer=_image_tokens("<|image>", "<|image|>", "<image|>"),
    ),
    "kimi_vl": VisionFamily(
        text=_TEXT
        | _ROUTED_EXPERTS
        | {"model_type": "deepseek_v3", "num_hidden_layers": 3, "num_key_value_heads": 4}
        | {"kv_lora_rank": 16, "q_lora_rank": None, "qk_rope_head_dim": 8, "v_head_dim": 16}
        | {"qk_nope_head_dim": 16},
        tower=_DEEP_TOWER
        | {"model_type": "moonvit", "embed_dim": 32, "patch_size": 14}
        | {"init_pos_emb_height": 8, "init_pos_emb_width": 8},
        scale=3,
        placeholder="<|media_pad|>",
        tokens=("<|media_start|>", "<|media_content|>", "<|media_end|>"),
        config={"media_placeholder_token_id": VOCAB_SIZE},
        around=("<|media_start|>image<|media_content|>", "<|media_end|>"),
    ),
}


def needs_mlx_vlm() -> None:
    """Skip the test, or the module at its import, where mlx-vlm is missing."""
    if importlib.util.find_spec("mlx_vlm") is None:
        pytest.skip("needs mlx-vlm (requirements/vision.txt)", allow_module_level=True)


def make_vision_model(family: str, path: Path, seed: int = 0, **changes: Any) -> Path:
    """Write a random model of ``family`` into the directory ``path``, and return ``path``.

    Its vocabulary is that of `tests.tiny_models.make_tiny` with the tokens of pictures after it.
    ``changes`` replace fields of the config's text part."""
    path.mkdir(parents=True, exist_ok=True)
    made = FAMILIES[family]
    special = (made.placeholder, *made.tokens)
    vocab_size = -(-(VOCAB_SIZE + len(special)) // 8) * 8
    text = {"model_type": family} | made.text | {"vocab_size": vocab_size} | changes
    config = made.config | {
        **(text if made.flat else {"text_config": text}),
        "model_type": family,
        "vision_config": made.tower,
        "vocab_size": vocab_size,
        "bos_token_id": 1,
        "eos_token_id": EOS,
        "pad_token_id": 0,
    }
    (path / "config.json").write_text(json.dumps(config, indent=2))
    weights = dict(tree_flatten(random_model(config, seed).parameters()))
    if made.tied:
        del weights["language_model.lm_head.weight"]
    mx.save_safetensors(str(path / "model.safetensors"), weights, metadata={"format": "mlx"})
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in special])
    tokenizer.save(str(path / "tokenizer.json"))
    named = tokenizer_config(TEMPLATE.replace("IMAGE", made.placeholder.join(made.around)))
    for name, content in (
        ("tokenizer_config.json", named | made.tokenizer),
        ("processor_config.json", made.processor),
        ("preprocessor_config.json", made.preprocessor),
    ):
        (path / name).write_text(json.dumps(content, indent=2))
    return path


@cache
def picture(seed: int, width: int = 30, height: int = 20) -> Image.Image:
    """Return a picture of noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels)


def random_model(config: dict[str, Any], seed: int) -> Any:
    """Return a model of mlx-vlm's own class with random weights."""
    package = importlib.import_module(f"mlx_vlm.models.{config['model_type']}")
    made = package.ModelConfig.from_dict(dict(config))
    made.text_config = package.TextConfig.from_dict(config.get("text_config", config))
    tower = package.VisionConfig.from_dict(config["vision_config"])
    if tower.model_type.startswith(("qwen3_vl", "qwen3_5")):
        tower.model_type = config["model_type"]
    made.vision_config = tower
    mx.random.seed(seed)
    model = package.Model(made)

    def shaken(weight: mx.array) -> mx.array:
        """Add noise to norms, biases and all that starts as ones or zeros, which hides bugs."""
        is_plain = weight.ndim == 1 or bool(mx.all(weight == weight.flatten()[0]).item())
        return weight + 0.1 * mx.random.normal(weight.shape) if is_plain else weight

    return model.update(tree_map(shaken, model.parameters()))
