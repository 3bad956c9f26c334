"""Replacement of functions in mlx-lm."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


def patch(home: ModuleType, name: str, ours: Any) -> None:
    """Replace ``name`` of ``home`` with ``ours``, also in model modules that imported it before."""
    theirs = getattr(home, name)
    setattr(home, name, ours)
    for path, module in list(sys.modules.items()):
        if path.startswith("mlx_lm.models.") and getattr(module, name, None) is theirs:
            setattr(module, name, ours)
