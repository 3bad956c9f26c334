"""The GPU's way of computing on a machine without one: for the zoo, benchmarks and tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx

forced = False
"""Whether a CPU computes as a GPU would now: what calls cost there says nothing about one."""


@contextmanager
def forced_gpu_path() -> Iterator[None]:
    """Make this process choose batches, slabs, sampling and look-ahead as on a GPU.

    MLX builds the same graphs as there and goes on computing on the CPU. Nothing is compiled:
    there that calls a C++ compiler, for seconds. Models should be loaded before: on a GPU the
    demo model is bfloat16, which is slow on a CPU."""
    global forced
    if forced:
        yield
        return
    kept = mx.default_device
    mx.default_device = lambda: mx.gpu
    mx.disable_compile()
    forced = True
    try:
        yield
    finally:
        forced = False
        mx.enable_compile()
        mx.default_device = kept
