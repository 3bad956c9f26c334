"""LoRA adapters, as mlx-lm writes and reads them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from engine.model.errors import AdapterUnusable
from engine.model.fingerprint import digest

if TYPE_CHECKING:  # not at run time: a fast BLAS has to be loaded before MLX
    import mlx.nn as nn

CONFIG, WEIGHTS = "adapter_config.json", "adapters.safetensors"


def check(path: Path) -> None:
    """Raises `AdapterUnusable` where ``path`` has not the files of an adapter."""
    if not path.is_dir():
        raise AdapterUnusable(f"there is no adapter at {path}: no such directory")
    for name in (CONFIG, WEIGHTS):
        if not (path / name).is_file():
            raise AdapterUnusable(f"{path} is not an adapter: it has no {name}")


def apply(model: nn.Module, path: Path) -> None:
    """Puts the adapter in ``path`` over ``model``, whose weights are loaded. Raises
    `AdapterUnusable` where it is no adapter, or one of another model."""
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.tuner.utils import load_adapters

    try:
        load_adapters(model, str(path))
        given = mx.load(str(path / WEIGHTS))
    except Exception as error:  # a config of any shape goes through mlx-lm's code
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise AdapterUnusable(f"the adapter in {path} cannot be used: {reason}") from error
    # mlx-lm leaves those that the file lacks as it drew them: at random.
    names = (name for name, _ in tree_flatten(model.parameters()))
    drawn = (name for name in names if name.rsplit(".", 1)[-1] in ("lora_a", "lora_b"))
    missing = next((name for name in drawn if name not in given), None)
    if missing is not None:
        raise AdapterUnusable(f"the adapter in {path} cannot be used: it lacks {missing}")
    model.eval()
    mx.eval(model.parameters())


def fingerprint(path: Path) -> str:
    """A hex name for the content of the adapter in ``path``, the same on every machine."""
    return digest(path / CONFIG, [path / WEIGHTS])
