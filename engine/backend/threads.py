"""Threads for work in NumPy.

NumPy releases the GIL in operations on large arrays. NumPy's BLAS must not start threads beside
ours, nor beside those of the BLAS that MLX uses.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
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
    """Run all pieces of ``work``, the last on this thread. A product in NumPy uses one thread."""
    if len(work) == 1:
        work[0]()
        return
    with numpy_threads(1):
        others = [_pool().submit(piece) for piece in work[:-1]]
        work[-1]()
        for other in others:
            other.result()


@contextmanager
def numpy_threads(count: int) -> Iterator[None]:
    """Compute NumPy's products with ``count`` threads, in builds with the OpenBLAS of its wheels.

    Other builds are left as they are. Two threads must not enter at the same time."""
    global _numpy_threads
    before = _numpy_threads
    _set_numpy_threads(count)
    _numpy_threads = count
    try:
        yield
    finally:
        _set_numpy_threads(before)
        _numpy_threads = before


_numpy_threads = 1


def keep_numpy_to_one_thread() -> None:
    """Compute NumPy's products with one thread, outside `numpy_threads`."""
    _set_numpy_threads(1)


def _set_numpy_threads(count: int) -> None:
    for function in _functions():
        function(count)


@cache
def _functions() -> tuple[Callable[[int], None], ...]:
    libraries = (Path(np.__file__).parents[1] / "numpy.libs").glob("*openblas*")
    loaded = [ctypes.CDLL(str(library)) for library in libraries]
    return tuple(getattr(one, name) for one in loaded for name in _SETTERS if hasattr(one, name))


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(1, num_threads() - 1), thread_name_prefix="host")
