"""Reads the weights of a head, which mlx-lm ignores, from the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.utils import infer_quant_config

from engine.backend.device_errors import compute
from engine.mtp.head import MTPHead
from engine.mtp.kinds import KINDS, HeadKind

LAYER = "model.layers.0."
"""Prefix of the layer's weights in a model with one layer."""
PART = f"{LAYER}part."
"""Temporary prefix of the other weights."""
NORMS = ("embedding_norm.weight", "hidden_norm.weight", "final_norm.weight")


class HeadUnusable(Exception):
    """The head of a checkpoint cannot be used. The message is one line for the user."""


def head_files(model: Any, path: Path) -> list[Path]:
    """Return the files in ``path`` with weights of the head of mlx-lm's ``model``.

    There are none if it has no head, or its architecture is not in `KINDS`. Files that mlx-lm does
    not read count too, so a converted checkpoint can have its head in a separate file."""
    kind = KINDS.get(getattr(model, "model_type", ""))
    if kind is None:
        return []
    prefix = _prefix(kind, model)
    files = sorted(path.glob("*.safetensors"))
    return [file for file in files if any(name.startswith(prefix) for name in _names(file))]


def load_head(model: Any, files: list[Path]) -> MTPHead:
    """Return the loaded head of ``model`` from its ``files`` (see `head_files`).

    Nothing else in the files is read. The layer and the conversion of its weights come from the
    model's own class with one layer: it joins experts, splits latents, and widens fp8. Raises
    `HeadUnusable`."""
    kind, args = KINDS[model.model_type], model.args
    prefix = _prefix(kind, model)
    stored = (item for file in files for item in _load(file).items())
    given = {k.removeprefix(prefix): v for k, v in stored if k.startswith(prefix)}
    try:
        one: Any = type(model)(replace(args, **kind.one_layer))  # little of this is evaluated
        named = _named(one.sanitize(_renamed(kind, given)))
        if kind.norms_from_zero and any(".experts." in name for name in given):
            # Not converted: the class did the same to the layer's norms.
            named |= {name: named[name] + 1.0 for name in NORMS}
        head = MTPHead(kind, one.layers[0], args.hidden_size, args.rms_norm_eps)
        _quantize(head, named)
        head.load_weights(list(named.items()))
    except (ValueError, KeyError, TypeError, IndexError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise HeadUnusable(reason) from error
    head.eval()
    compute(head)
    return head


def _prefix(kind: HeadKind, model: Any) -> str:
    return kind.prefix.format(layers=model.args.num_hidden_layers)


def _names(file: Path) -> list[str]:
    """Return the names of the arrays in ``file``; empty if it cannot be read."""
    try:
        return list(_load(file))
    except (RuntimeError, ValueError):
        return []


def _load(file: Path) -> dict[str, mx.array]:
    """Return the arrays of ``file``. Only those used are actually read."""
    found: dict[str, mx.array] = mx.load(str(file))
    return found


def _renamed(kind: HeadKind, given: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Return the weights of a head with names of the only layer of a model."""
    ours = {theirs: name for name, theirs in kind.parts.items()}
    found = {}
    for name, weight in given.items():
        part, _, end = name.rpartition(".")
        if part in ours:
            found[f"{PART}{ours[part]}.{end}"] = weight
        elif name.startswith(kind.block) and not name.startswith(kind.shared):
            found[LAYER + name.removeprefix(kind.block)] = weight
    return found


def _named(weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Return the weights of `_renamed` under their names in `MTPHead`."""
    found = {}
    for name, weight in weights.items():
        if name.startswith(PART):
            found[name.removeprefix(PART)] = weight
        else:
            found[f"layer.{name.removeprefix(LAYER)}"] = weight
    return found


def _quantize(head: nn.Module, weights: Mapping[str, mx.array]) -> None:
    """Quantize the modules of ``head`` whose ``weights`` are quantized."""

    def kind_of(path: str, module: nn.Module) -> bool | dict[str, Any]:
        if not hasattr(module, "to_quantized") or f"{path}.scales" not in weights:
            return False
        kind: dict[str, Any] = infer_quant_config(path, module, weights)
        return kind

    nn.quantize(head, class_predicate=kind_of)
