"""Keeps MLX out of the router's process and container image."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType


def leave_out_mlx() -> None:
    """Make ``mlx_lm`` an empty package from which modules can be imported.

    Its own code imports MLX, transformers' models and everything for generation. The router needs
    only its tokenizers and tool parsers. Call it before the first import of ``mlx_lm``, in a
    process that never runs a model.
    """
    found = importlib.util.find_spec("mlx_lm")
    if found is None or "mlx_lm" in sys.modules:
        return
    package = ModuleType("mlx_lm")
    package.__path__ = list(found.submodule_search_locations or ())
    package.__spec__ = found
    sys.modules["mlx_lm"] = package
