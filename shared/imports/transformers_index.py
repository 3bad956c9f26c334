"""Import transformers without reading the source files of all its models at every start.

It reads some 1,600 files twice to find which names are in which module: a second of CPU time, and
more from a cold disk. This module keeps the result in a file of the user's cache, by version and
location.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from shared.paths import user_cache

_MODULE = "transformers.utils.import_utils"
Index = dict[frozenset[str], dict[str, set[str]]]
"""The names of each module, by what they need."""
_Stored = list[tuple[list[str], dict[str, set[str]]]]


def remember_transformers(folder: Path | None = None) -> None:
    """Make the first import of transformers use the index in ``folder``, or write it there.

    Does nothing without a folder that can be read or written, or once transformers is imported.
    """
    if "transformers" not in sys.modules:
        # A new list, and it stays in place: other threads that import may be iterating over the old
        # one.
        sys.meta_path = [_Finder(folder or user_cache() / "transformers"), *sys.meta_path]


class _Finder(MetaPathFinder):
    """Finds one module, and changes it once it is loaded."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find_spec(
        self, name: str, path: Any, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _MODULE:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = _Loader(name, spec.loader.path, self._folder)
        return spec


class _Loader(SourceFileLoader):
    def __init__(self, name: str, path: str, folder: Path) -> None:
        super().__init__(name, path)
        self._folder = folder

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        search = getattr(module, "define_import_structure", None)
        models = Path(self.path).parents[1] / "models"
        version = getattr(sys.modules["transformers"], "__version__", "dev")
        if search is None or "dev" in version or not models.is_dir():
            return
        facts = f"{version} {models} {models.stat().st_mtime_ns}"
        kept = self._folder / f"{hashlib.sha256(facts.encode()).hexdigest()}.json"

        def find(module_path: str | Path, prefix: str | None = None) -> Index:
            place = Path(module_path)
            if models not in (place, place.parent):
                found: Index = search(module_path, prefix=prefix)
                return found
            index = _read(kept)
            if index is None:
                index = search(str(models))
                _write(kept, index)
            start = "" if prefix is None else f"{prefix}."
            return {
                needs: {start + name: names for name, names in modules.items()}
                for needs, modules in index.items()
            }

        vars(module)["define_import_structure"] = find


def _read(path: Path) -> Index | None:
    """Return the index from a file; None if there is no usable one."""
    try:
        stored = msgspec.json.decode(path.read_bytes(), type=_Stored)
    except (OSError, msgspec.MsgspecError):
        return None
    return {frozenset(needs): modules for needs, modules in stored}


def _write(path: Path, index: Index) -> None:
    """Write ``index`` if possible, and remove those of other versions."""
    scratch = path.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        for other in path.parent.glob("*.json"):
            other.unlink(missing_ok=True)
        stored = [(sorted(needs), modules) for needs, modules in index.items()]
        scratch.write_bytes(msgspec.json.encode(stored, order="deterministic"))
        scratch.replace(path)
