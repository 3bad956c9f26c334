"""The GPU's way of computing on a machine without one: for the zoo, benchmarks and tests."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import mlx.core as mx

logger = logging.getLogger(__name__)

VARIABLE = "MLX_LM_SERVER_GPU_PATH"
"""Environment variable: ``1`` forces it in a process that has no GPU, for as long as it runs."""

forced = False
"""Whether a CPU computes as a GPU would now: what calls cost there says nothing about one."""


def force_if_asked() -> None:
    """Do `forced_gpu_path` for good if the environment asks for it and there is no GPU."""
    if os.environ.get(VARIABLE) == "1" and mx.default_device() == mx.cpu:
        logger.warning("%s: this CPU computes as a GPU does, slowly", VARIABLE)
        _force()


@contextmanager
def forced_gpu_path() -> Iterator[None]:
    """Make this process choose batches, slabs, sampling and look-ahead as on a GPU.

    MLX builds the same graphs as there and goes on computing on the CPU. Nothing is compiled:
    there that calls a C++ compiler, for seconds. Models should be loaded before: on a GPU the
    demo model is bfloat16, which is slow on a CPU."""
    if forced:
        yield
        return
    undo = _force()
    try:
        yield
    finally:
        undo()


def _force() -> Callable[[], None]:
    """Force the GPU's path. Return a function that ends it."""
    global forced
    kept, forced = mx.default_device, True
    mx.default_device = lambda: mx.gpu
    mx.disable_compile()

    def undo() -> None:
        global forced
        mx.default_device, forced = kept, False
        mx.enable_compile()

    return undo
