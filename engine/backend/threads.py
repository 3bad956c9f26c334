"""Threads for work in NumPy.

NumPy releases the GIL in operations on large arrays. NumPy's BLAS must not start threads in
addition to ours and to those of the BLAS that MLX uses.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from threading import Thread

import numpy as np

from engine.backend.blas import physical_cores

_SETTERS = ("scipy_openblas_set_num_threads64_", "scipy_openblas_set_num_threads")


_Piece = tuple[Callable[[], None], SimpleQueue[BaseException | None]]


@cache
def num_threads() -> int:
    """Return how many pieces of work run at once."""
    return int(os.environ.get("MKL_NUM_THREADS") or 0) or physical_cores()


def in_parallel(work: Sequence[Callable[[], None]]) -> None:
    """Run all pieces of ``work``, the last on this thread. Raises the exception of any of them.

    Decode steps do this in every layer: an executor's futures take 0.1 ms, these queues less."""
    results: SimpleQueue[BaseException | None] = SimpleQueue()
    for piece in work[:-1]:
        _waiting().put((piece, results))
    try:
        work[-1]()
    finally:  # the others write to the same arrays
        raised = [results.get() for _ in work[:-1]]
    for error in filter(None, raised):
        raise error


def keep_numpy_to_one_thread() -> None:
    """Compute each NumPy product on one thread, in builds with the OpenBLAS of its wheels.

    Other builds are left unchanged."""
    for library in (Path(np.__file__).parents[1] / "numpy.libs").glob("*openblas*"):
        loaded = ctypes.CDLL(str(library))
        for name in _SETTERS:
            if hasattr(loaded, name):
                getattr(loaded, name)(1)


@cache
def _waiting() -> SimpleQueue[_Piece]:
    """Return the queue of the helper threads."""
    waiting: SimpleQueue[_Piece] = SimpleQueue()
    for _ in range(max(1, num_threads() - 1)):
        Thread(target=_help, args=(waiting,), name="host", daemon=True).start()
    return waiting


def _help(waiting: SimpleQueue[_Piece]) -> None:
    while True:
        piece, results = waiting.get()
        outcome: BaseException | None = None
        try:
            piece()
        except BaseException as error:
            outcome = error
        del piece  # before the caller continues, because it may hold large arrays
        results.put(outcome)
        del results, outcome
