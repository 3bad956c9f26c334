"""A process of a release with other versions of the protocol: `python -m
tests.e2e.operation.other_release 2,1 MODULE ARGUMENTS`, its own version first."""

from __future__ import annotations

import importlib.util
import runpy
import sys
from pathlib import Path

CODEC = "shared.wire.codec"


def main() -> None:
    _, versions, module, *arguments = sys.argv
    supported = tuple(map(int, versions.split(",")))
    spec = importlib.util.find_spec("shared")
    assert spec is not None and spec.submodule_search_locations is not None
    path = Path(spec.submodule_search_locations[0], "wire", "codec.py")
    made = importlib.util.spec_from_file_location(CODEC, path)
    assert made is not None and made.loader is not None
    codec = importlib.util.module_from_spec(made)
    sys.modules[CODEC] = codec  # before the messages, whose defaults come from it
    made.loader.exec_module(codec)
    vars(codec).update(PROTOCOL_VERSION=supported[0], SUPPORTED_VERSIONS=supported)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
