"""Puts functions of ours in the place of mlx-lm's."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


def patch(home: ModuleType, name: str, ours: Any) -> None:
    """Makes ``ours`` what ``home`` calls ``name``, also in model modules that took the
    old one from there when they were imported."""
    theirs = getattr(home, name)
    setattr(home, name, ours)
    for path, module in list(sys.modules.items()):
        if path.startswith("mlx_lm.models.") and getattr(module, name, None) is theirs:
            setattr(module, name, ours)
