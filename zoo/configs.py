"""The config of a tiny model for every architecture.

It has the names of `COMMON`, of which a model module takes those it knows, and what `SPECIAL`
adds for the architecture.
"""

from __future__ import annotations

from zoo.common import COMMON, VOCAB_SIZE, Config
from zoo.special import SPECIAL

MODULES = {"falcon_mamba": "mamba"}
"""Architectures that share another's module, but compute something different."""

TEXT_CONFIG: dict[str, str] = {
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n",
    "gemma4": "gemma4_text",
    "kimi_k25": "deepseek_v3",
    "kimi_k3": "kimi_k3",
    "kimi_vl": "deepseek_v3",
    "lfm2-vl": "lfm2",
    "llama4": "llama4",
    "minimax_m3_vl": "minimax_m3_vl",
    "mistral3": "ministral3",
    "muse_spark": "muse_spark",
    "pixtral": "llama",
    "prism_hadamard_qwen35": "qwen3_5",
    "qwen2_vl": "qwen2",
    "qwen3_5": "qwen3_5",
    "qwen3_5_moe": "qwen3_5_moe",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
}
"""Architectures that wrap another one, whose config is their text config."""

GATE = {"path": "model.layers.1.mlp.gate_proj", "embedding": False, "dtype": "float16", "block": 0}
WRAPPER: dict[str, Config] = {
    "prism_hadamard_qwen35": {
        "schema_version": 1,
        "tensor_namespace": "mlx-lm-text",
        "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
        "modules": [GATE],
    },
}
"""Fields of the config around the text config."""


def config(name: str) -> Config:
    """Return the config of a tiny model of architecture ``name``, as in config.json."""
    inner = TEXT_CONFIG.get(name, name)
    text = {"model_type": inner} | COMMON | SPECIAL.get(inner, {})
    if name not in TEXT_CONFIG:
        return text
    text |= SPECIAL.get(name, {})
    whole = {"model_type": name, "vocab_size": VOCAB_SIZE, "text_config": text}
    return whole | WRAPPER.get(name, {})
