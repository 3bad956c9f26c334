"""Builds tiny random models from mlx-lm's own classes."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

import mlx.core as mx
import mlx_lm.models
from mlx.utils import tree_map

from zoo.configs import MODULES, config


def architectures() -> list[str]:
    """Return all names, sorted: mlx-lm's modules, which are not all models, and `MODULES`."""
    # Without importing anything, because some modules crash the process that imports them.
    names = {module.name for module in pkgutil.iter_modules(mlx_lm.models.__path__)}
    return sorted(names | MODULES.keys(), key=str.lower)


def build(name: str, seed: int = 0) -> Any:
    """Return a model of architecture ``name``; None if its module has no model.

    It has about 200,000 parameters in float32; the same ``seed`` gives the same weights. Raises
    whatever the module raises.
    """
    module = importlib.import_module(f"mlx_lm.models.{MODULES.get(name, name)}")
    if not (hasattr(module, "Model") and hasattr(module, "ModelArgs")):
        return None
    mx.random.seed(seed)
    model = module.Model(module.ModelArgs.from_dict(config(name)))
    model.update(tree_map(_perturbed, model.parameters()))
    mx.eval(model.parameters())
    return model


def _perturbed(weight: mx.array) -> mx.array:
    """Add noise, because norms, biases, sinks and some routers start as ones or zeros, which hides
    bugs."""
    if not mx.issubdtype(weight.dtype, mx.floating):
        return weight
    if weight.ndim > 1 and mx.any(weight != 0).item():
        return weight
    return weight + (0.1 * mx.random.normal(weight.shape)).astype(weight.dtype)
