"""Whether a model can be divided across ranks, determined from its config, and the division."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.model.errors import ModelUnavailable
from shared.model_config import config_int

if TYPE_CHECKING:  # not at run time: a fast BLAS must be loaded before MLX
    import mlx.core as mx
    import mlx.nn as nn

_HEADS = {
    "num_attention_heads": "attention heads",
    "num_key_value_heads": "KV heads",
    "linear_num_key_heads": "linear KV heads",
    "linear_num_value_heads": "linear attention heads",
}
_WIDTHS = {
    "intermediate_size": "columns of its MLP",
    "moe_intermediate_size": "columns of each expert",
    "shared_expert_intermediate_size": "columns of the shared expert",
}
_WITHOUT_KV_HEADS = "kv_lora_rank"
"""In configs of models whose heads share latents, the number of KV heads has no meaning."""


def indivisible(path: Path, ranks: int) -> str | None:
    """Return what in the model in ``path`` does not divide by ``ranks``, None if everything does.

    mlx-lm does not check this, and would drop the remaining heads."""
    config = _config(path)
    is_latent = config_int(config, _WITHOUT_KV_HEADS) > 0
    for key, name in _HEADS.items():
        count = config_int(config, key)
        if count % ranks and not (is_latent and key == "num_key_value_heads"):
            return f"{count} {name} are not divisible by {ranks}"
    # Quantized weights can only be divided between groups.
    quantization = config.get("quantization")
    group = config_int(quantization, "group_size") or 1 if isinstance(quantization, dict) else 1
    heads = config_int(config, "num_attention_heads")
    head_dim = config_int(config, "head_dim")
    widths = {name: config_int(config, key) for key, name in _WIDTHS.items()}
    widths["columns of all heads"] = heads * head_dim or config_int(config, "hidden_size")
    for name, width in widths.items():
        if width % (group * ranks):
            groups = f" in groups of {group}" if group > 1 else ""
            return f"{width} {name} are not divisible by {ranks}{groups}"
    return None


def max_ranks(path: Path, ranks: int) -> int:
    """Return the max number of ranks, up to ``ranks``, by which the model in ``path`` can be
    divided."""
    return next(count for count in range(ranks, 0, -1) if indivisible(path, count) is None)


def refuse_without_shard(model: object, kind: str, name: str) -> None:
    """Raise `ModelUnavailable` if ``model``, or its class, cannot be divided."""
    if not hasattr(model, "shard"):
        raise ModelUnavailable(
            f"the model in {name} cannot be divided across ranks: mlx-lm does not support it for "
            f"{kind}"
        )


def shard(model: nn.Module, group: mx.distributed.Group, name: str) -> None:
    """Reduce ``model``, whose weights are not loaded yet, to this rank's part, and load that.

    One array is loaded at a time, so that there is never more in memory than this rank's part and
    one whole array. Raises: `ModelUnavailable`."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    refuse_without_shard(model, getattr(model, "model_type", type(model).__name__), name)
    try:
        model.shard(group)
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ModelUnavailable(
            f"the model in {name} cannot be divided across {group.size()} ranks: {reason}"
        ) from error
    for _, array in tree_flatten(model.parameters()):
        mx.eval(array)


def _config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelUnavailable(f"cannot read the config of the model in {path}") from error
    if not isinstance(config, dict):
        raise ModelUnavailable(f"the config of the model in {path} is not an object")
    return config
