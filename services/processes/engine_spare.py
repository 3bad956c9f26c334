"""`python -m services.processes.engine_spare`: imports everything that engines need, then becomes
one.

It waits on the link to its supervisor for the arguments of an engine. The successor of a crashed
engine then starts by loading its weights.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import socket
from collections.abc import Mapping
from typing import Any

from engine.backend.blas import load_fast_blas
from engine.model.starting import lean_imports
from services.processes import engine
from shared.exits import EXIT_OK
from shared.supervisor_link import LINK_VARIABLE

MODULES = (
    *("engine.core", "engine.model.load", "engine.replica.build", "engine.replica.intake"),
    *("engine.io.store.client", "engine.cpu.decoder.decoder", "onnx", "onnxruntime"),
)


def main() -> int:
    """Wait for the arguments, then run as that engine; return the exit code."""
    load_fast_blas()
    with lean_imports():
        for module in MODULES:
            with contextlib.suppress(ImportError):  # the engine will report what is missing
                importlib.import_module(module)
    order = _wait(int(os.environ[LINK_VARIABLE]))
    if order is None:
        return EXIT_OK
    os.environ.update(order["environment"])
    return engine.main(order["arguments"])


def _wait(descriptor: int) -> Mapping[str, Any] | None:
    """Return the supervisor's first message, None if the supervisor is gone."""
    link = socket.socket(fileno=descriptor)
    data = b""
    while not data.endswith(b"\n"):
        received = link.recv(1)  # anything after this line is for the engine
        if not received:
            return None
        data += received
    link.detach()  # the engine reads it from the environment
    order: Mapping[str, Any] = json.loads(data)
    return order


if __name__ == "__main__":
    engine.leave(main())
