"""LoRA adapters in mlx-lm's format."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from engine.model.errors import AdapterUnusable
from engine.model.fingerprint import digest

if TYPE_CHECKING:  # not at run time: a fast BLAS must be loaded before MLX
    import mlx.nn as nn

CONFIG, WEIGHTS = "adapter_config.json", "adapters.safetensors"


def check(path: Path) -> None:
    """Raise `AdapterUnusable` if ``path`` lacks the files of an adapter."""
    if not path.is_dir():
        raise AdapterUnusable(f"there is no adapter at {path}: directory not found")
    for name in (CONFIG, WEIGHTS):
        if not (path / name).is_file():
            raise AdapterUnusable(f"{path} is not an adapter: {name} is missing")


def apply(model: nn.Module, path: Path) -> None:
    """Apply the adapter in ``path`` to ``model``, whose weights are loaded.

    Raises `AdapterUnusable` if it is not an adapter, or belongs to another model.
    """
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.tuner.utils import load_adapters

    try:
        load_adapters(model, str(path))
        given = mx.load(str(path / WEIGHTS))
    except Exception as error:  # mlx-lm's code takes a config of any shape
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise AdapterUnusable(f"cannot use the adapter in {path}: {reason}") from error
    # mlx-lm keeps its random initial values for weights missing from the file.
    names = (name for name, _ in tree_flatten(model.parameters()))
    wanted = (name for name in names if name.rsplit(".", 1)[-1] in ("lora_a", "lora_b"))
    missing = next((name for name in wanted if name not in given), None)
    if missing is not None:
        raise AdapterUnusable(f"cannot use the adapter in {path}: {missing} is missing")
    model.eval()
    mx.eval(model.parameters())


def fingerprint(path: Path) -> str:
    """Return a hex name for the content of the adapter, the same on every machine."""
    return digest(path / CONFIG, [path / WEIGHTS])
