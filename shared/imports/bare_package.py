"""Import modules of a package without running the package's own imports."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType


def leave_out_code_of(name: str) -> bool:
    """Put an empty package ``name`` in place, unless it is imported already, so that its modules
    can be imported without its own code. Return False if it is not installed.
    """
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
