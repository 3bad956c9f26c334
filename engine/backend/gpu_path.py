"""Simulation of the GPU code path on a machine without a GPU: for the zoo, benchmarks and tests."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import mlx.core as mx

logger = logging.getLogger(__name__)

VARIABLE = "MLX_LM_SERVER_GPU_PATH"
"""Environment variable: ``1`` forces the GPU path in a process that has no GPU."""

forced = False
"""Whether a CPU currently follows the GPU path: call costs measured then say nothing
about a GPU."""


def force_if_asked() -> None:
    """Enable `forced_gpu_path` permanently if the environment asks for it and there is no GPU."""
    if os.environ.get(VARIABLE) == "1" and mx.default_device() == mx.cpu:
        logger.warning("%s: this CPU follows the GPU code path, slowly", VARIABLE)
        _force()


@contextmanager
def forced_gpu_path() -> Iterator[None]:
    """Make this process choose batches, pages, sampling and look-ahead as on a GPU.

    MLX builds the same graphs as on a GPU but computes them on the CPU. Nothing is compiled,
    because that would run a C++ compiler for seconds. Load models beforehand: on a GPU the demo
    model is bfloat16, which is slow on a CPU."""
    if forced:
        yield
        return
    undo = _force()
    try:
        yield
    finally:
        undo()


def _force() -> Callable[[], None]:
    """Force the GPU path. Return a function that ends it."""
    global forced
    kept, forced = mx.default_device, True
    mx.default_device = lambda: mx.gpu
    mx.disable_compile()

    def undo() -> None:
        global forced
        mx.default_device, forced = kept, False
        mx.enable_compile()

    return undo
