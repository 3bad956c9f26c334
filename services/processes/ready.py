"""The last steps of an engine's startup."""

from __future__ import annotations

import gc
import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path

from engine.io.status import EngineStatus
from engine.io.thread import IOThread
from engine.model.starting import StartTimes
from shared import wire

logger = logging.getLogger("engine")


def announce(
    hello: wire.Hello,
    files: dict[str, Path],
    io_thread: IOThread,
    status: EngineStatus,
    times: StartTimes,
) -> None:
    """Introduce the loaded model to routers, with its tokenizer ``files``, and log the times."""
    from engine.replica.memory import device_memory_bytes

    io_thread.introduce(hello, files)
    status.device_bytes = device_memory_bytes()
    status.enter_phase("ready")
    gc.freeze()  # existing objects stay; later collections need not scan them
    logger.info("ready: %s, after %s", hello.model, times)


def digests(files: Mapping[str, Path]) -> dict[str, str]:
    """Return the SHA-256 of each file in hexadecimal, by name."""
    return {name: hashlib.sha256(file.read_bytes()).hexdigest() for name, file in files.items()}
