"""Packages whose modules are imported without what the package itself imports."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType


def leave_out_code_of(name: str) -> bool:
    """Make the package ``name`` one without code of its own, from which modules can be imported, if
    it was not imported before. Return False if it is not installed."""
    if name in sys.modules:
        return True
    found = importlib.util.find_spec(name)
    if found is None:
        return False
    package = ModuleType(name)
    package.__path__ = list(found.submodule_search_locations or ())
    package.__spec__ = found
    sys.modules[name] = package
    return True
