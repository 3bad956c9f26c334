"""Threads for work in NumPy.

NumPy releases the GIL in operations on large arrays. NumPy's BLAS must not start threads beside
ours, nor beside those of the BLAS that MLX uses.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import numpy as np

from engine.backend.blas import physical_cores

_SETTERS = ("scipy_openblas_set_num_threads64_", "scipy_openblas_set_num_threads")


@cache
def num_threads() -> int:
    """Return how many pieces of work run at once."""
    return int(os.environ.get("MKL_NUM_THREADS") or 0) or physical_cores()


def in_parallel(work: Sequence[Callable[[], None]]) -> None:
    """Run all pieces of ``work``, the last on this thread."""
    others = [_pool().submit(piece) for piece in work[:-1]]
    work[-1]()
    for other in others:
        other.result()


def keep_numpy_to_one_thread() -> None:
    """Compute each product in NumPy with one thread, in builds with the OpenBLAS of its wheels.

    Other builds are left as they are."""
    for library in (Path(np.__file__).parents[1] / "numpy.libs").glob("*openblas*"):
        loaded = ctypes.CDLL(str(library))
        for name in _SETTERS:
            if hasattr(loaded, name):
                getattr(loaded, name)(1)


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(1, num_threads() - 1), thread_name_prefix="host")
