"""Paths as users write them."""

from __future__ import annotations

import os
from pathlib import Path


def user_path(text: str) -> Path:
    """Return ``text`` as a path, with ``~`` replaced. One of an unknown user stays: it does not
    exist, which is then said."""
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

    Our packages have plain names. With -P and this path, a folder of the same name in the working
    directory is not imported in place of one of them."""
    root = str(Path(__file__).resolve().parents[1])
    return os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
