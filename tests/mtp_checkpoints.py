"""Random heads for multi-token prediction, stored as the published checkpoints store theirs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx

from tests.tiny_models import Kind

HEAD_KINDS: tuple[Kind, ...] = ("deepseek_v3", "glm4_moe", "mimo", "qwen3_next")
HEAD_FILE = "head.safetensors"
"""Beside the model's own files: of tiny models of `deepseek_v3` mlx-lm leaves a head out only if
they have 61 layers, and of `qwen3_next` only if they are not converted."""


def add_head(kind: Kind, path: Path, seed: int = 0, file: str = HEAD_FILE) -> dict[str, mx.array]:
    """Write the weights of a random head for the tiny model in ``path``, and return them."""
    config = json.loads((path / "config.json").read_text())
    shapes = _shapes(kind, config)
    keys = mx.random.split(mx.random.key(seed), len(shapes))
    weights = {
        name: mx.random.normal(shape, key=key) * (0.3 if len(shape) > 1 else 0.1)
        + (len(shape) == 1 and kind != "qwen3_next" and name.endswith("norm.weight"))
        for (name, shape), key in zip(shapes.items(), keys, strict=True)
    }
    mx.save_safetensors(str(path / file), weights, {"format": "pt"})
    return weights


def add_likely_head(kind: Kind, path: Path, seed: int = 0) -> None:
    """Write a head that often guesses right for the tiny model in ``path``, which is changed.

    What the layers of both add to the embeddings becomes small, so what comes next depends on the
    last token most of all, and the head hands that token's embedding on."""
    stored = dict(mx.load(str(path / "model.safetensors")).items())
    loud = ("o_proj.weight", "down_proj.weight", "out_proj.weight")
    weights = {k: v * 0.04 if k.endswith(loud) else v for k, v in stored.items()}
    mx.save_safetensors(str(path / "model.safetensors"), weights, {"format": "mlx"})
    head = add_head(kind, path, seed)
    names = {name.rpartition(".weight")[0].rpartition(".")[2]: name for name in head}
    token, joined, last = {
        "mimo": ("token_layernorm", "input_proj", "final_layernorm"),
        "qwen3_next": ("pre_fc_norm_embedding", "fc", "norm"),
    }.get(kind, ("enorm", "eh_proj", "norm"))
    dim = len(weights["model.norm.weight"])
    from_zero = kind == "qwen3_next"
    halves = [mx.eye(dim), mx.zeros((dim, dim))]
    head = {k: v * 0.04 if k.endswith(loud) else v for k, v in head.items()}
    head[names[token]] = mx.full((dim,), 0.0 if from_zero else 1.0)
    head[names[joined]] = mx.concatenate(halves[::-1] if kind == "mimo" else halves, axis=1)
    head[names[last]] = weights["model.norm.weight"] - from_zero
    mx.save_safetensors(str(path / HEAD_FILE), head, {"format": "pt"})


def models_with_heads(
    add: Callable[[Kind, Path], object], plain: Callable[[Kind], Path], root: Path
) -> Callable[[Kind], Path]:
    """Return a function for the directory, in ``root``, of a ``plain`` model with a head from
    ``add``."""

    def make(kind: Kind) -> Path:
        path = root / kind
        if not path.exists():
            add(kind, shutil.copytree(plain(kind), path))
        return path

    return make


def prefix_of(kind: Kind, config: dict[str, Any]) -> str:
    """Return the prefix of the head's weights."""
    names = {"mimo": "model.mtp_layers.0.", "qwen3_next": "mtp."}
    return names.get(kind, f"model.layers.{config['num_hidden_layers']}.")


def _shapes(kind: Kind, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    dim, prefix = config["hidden_size"], prefix_of(kind, config)
    vocab = config["vocab_size"], dim
    parts: dict[str, tuple[int, ...]]
    if kind == "mimo":
        parts = {"token_layernorm": (dim,), "hidden_layernorm": (dim,), "final_layernorm": (dim,)}
        parts |= {"input_proj": (dim, 2 * dim)}
        block = prefix
    elif kind == "qwen3_next":
        parts = {"pre_fc_norm_embedding": (dim,), "pre_fc_norm_hidden": (dim,), "norm": (dim,)}
        parts |= {"fc": (dim, 2 * dim)}
        block = f"{prefix}layers.0."
    else:
        parts = {"enorm": (dim,), "hnorm": (dim,), "shared_head.norm": (dim,)}
        parts |= {"eh_proj": (dim, 2 * dim), "embed_tokens": vocab, "shared_head.head": vocab}
        block = prefix
    found = {f"{prefix}{name}.weight": shape for name, shape in parts.items()}
    norms = ("input_layernorm", "post_attention_layernorm")
    layer: dict[str, tuple[int, ...]] = {f"{name}.weight": (dim,) for name in norms}
    layer |= _latents(config) if kind == "deepseek_v3" else _attention(kind, config)
    layer |= _mlp("mlp.", dim, config["intermediate_size"]) if kind == "mimo" else {}
    layer |= {} if kind == "mimo" else _experts(kind, config)
    return found | {block + name: shape for name, shape in layer.items()}


def _attention(kind: Kind, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    dim, size = config["hidden_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    asked = 2 * heads if kind == "qwen3_next" else heads  # with a gate for each
    found: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (asked, dim),
        "self_attn.k_proj.weight": (kv_heads, dim),
        "self_attn.v_proj.weight": (kv_heads, dim),
        "self_attn.o_proj.weight": (dim, heads),
    }
    if kind == "mimo":
        sizes = {"q": heads, "k": kv_heads, "v": kv_heads}
        return found | {f"self_attn.{name}_proj.bias": (size,) for name, size in sizes.items()}
    return found | {f"self_attn.{name}_norm.weight": (size,) for name in "qk"}


def _latents(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    dim, heads = config["hidden_size"], config["num_attention_heads"]
    rank, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
    nope, value, asked = config["qk_nope_head_dim"], config["v_head_dim"], config["q_lora_rank"]
    return {
        "self_attn.q_a_proj.weight": (asked, dim),
        "self_attn.q_a_layernorm.weight": (asked,),
        "self_attn.q_b_proj.weight": (heads * (nope + rope), asked),
        "self_attn.kv_a_proj_with_mqa.weight": (rank + rope, dim),
        "self_attn.kv_a_layernorm.weight": (rank,),
        "self_attn.kv_b_proj.weight": (heads * (nope + value), rank),
        "self_attn.o_proj.weight": (dim, heads * value),
    }


def _experts(kind: Kind, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    dim, inner = config["hidden_size"], config["moe_intermediate_size"]
    count = config["num_experts"]
    found: dict[str, tuple[int, ...]] = {"mlp.gate.weight": (count, dim)}
    for expert in range(count):
        found |= _mlp(f"mlp.experts.{expert}.", dim, inner)
    if kind == "qwen3_next":
        shared = _mlp("mlp.shared_expert.", dim, config["shared_expert_intermediate_size"])
        return found | shared | {"mlp.shared_expert_gate.weight": (1, dim)}
    found |= _mlp("mlp.shared_experts.", dim, inner * config["n_shared_experts"])
    return found | {"mlp.gate.e_score_correction_bias": (count,)}


def _mlp(prefix: str, dim: int, inner: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}gate_proj.weight": (inner, dim),
        f"{prefix}up_proj.weight": (inner, dim),
        f"{prefix}down_proj.weight": (dim, inner),
    }
