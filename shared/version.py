"""The version of the installed server."""

from __future__ import annotations

import importlib.metadata
from functools import cache


@cache
def installed_version() -> str:
    """Return the installed release; ``unknown`` in a checkout that is not installed."""
    try:
        return importlib.metadata.version("mlx-lm-server")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
