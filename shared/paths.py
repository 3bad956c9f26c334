"""Paths as users write them."""

from __future__ import annotations

import os
from pathlib import Path


def user_path(text: str) -> Path:
    """Return ``text`` as a path, with ``~`` expanded. The ``~`` of an unknown user is kept: such a
    path does not exist, which is reported later.
    """
    try:
        return Path(text).expanduser()
    except RuntimeError:
        return Path(text)


def user_cache() -> Path:
    """Return this program's folder in the user's cache."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "mlx-lm-server"


def python_path() -> str:
    """Return PYTHONPATH for a child that is started with -P.

    Our packages have common names. With -P and this path, the child does not import a folder of the
    same name from its working directory instead.
    """
    root = str(Path(__file__).resolve().parents[1])
    return os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
