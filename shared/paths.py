"""Paths as users write them."""

from __future__ import annotations

from pathlib import Path


def user_path(text: str) -> Path:
    """Return ``text`` as a path, with ``~`` replaced. One of an unknown user stays: it does not
    exist, which is then said."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        return Path(text)
