"""Rows of embeddings, read from the checkpoint files.

A process needs few rows at a time. Mapped files do not count as its memory: the system may drop
what it has read and read it again.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from engine.model.errors import FilesChanged
from shared.safetensors_header import as_fp32, read_header

_TYPES = {
    "F32": (mx.float32, np.float32),
    "F16": (mx.float16, np.float16),
    "BF16": (mx.bfloat16, np.uint16),  # see `as_fp32`
    "U32": (mx.uint32, np.uint32),
    "U8": (mx.uint8, np.uint8),
}
"""Types of MLX and NumPy by their names in safetensors."""
_ROWS_AT_ONCE = 4096


class FileRows:
    """The rows of one array, in the file from which it was loaded."""

    def __init__(self, file: Path, start: int, shape: Sequence[int], kind: str) -> None:
        """``start``: the offset of the array in ``file``, in bytes. ``kind``: its type
        in the file."""
        self._file = file.open("rb")
        self._state = self._found_state()
        self._map = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
        self._kind = kind
        flat = np.frombuffer(self._map, _TYPES[kind][1], math.prod(shape), start)
        self._array: NDArray[Any] = flat.reshape(shape)

    def has(self, array: mx.array) -> bool:
        """Return whether the file has the content of ``array``, which may have a wider type."""
        starts = range(0, array.shape[0], _ROWS_AT_ONCE)
        places = (slice(start, start + _ROWS_AT_ONCE) for start in starts)
        same = all(mx.array_equal(mx.array(self._rows(at)), array[at]) for at in places)
        self._map.madvise(mmap.MADV_DONTNEED)  # release the pages that were read
        return same

    def __getitem__(self, numbers: NDArray[Any]) -> NDArray[Any]:
        """Return these rows, floats in fp32. Raises `FilesChanged`."""
        if self._found_state() != self._state:
            raise FilesChanged(f"{self._file.name} was modified while its model is served")
        return self._rows(numbers)

    def _rows(self, place: slice | NDArray[Any]) -> NDArray[Any]:
        rows: NDArray[Any] = self._array[place]
        return as_fp32(self._kind, rows) if self._kind in ("BF16", "F16") else rows

    def _found_state(self) -> tuple[int, int]:
        found = os.fstat(self._file.fileno())
        return found.st_mtime_ns, found.st_size


def find(files: Sequence[Path], arrays: Mapping[str, mx.array]) -> dict[str, FileRows]:
    """Return by name the rows of those ``arrays`` that are in safetensors ``files`` with the same
    content, whatever their names in the files, in the same or a narrower type."""
    try:
        headers = [(file, *read_header(file)) for file in files]
        found = {name: _found(headers, array) for name, array in arrays.items()}
    except (OSError, ValueError):  # files that cannot be mapped, or are truncated
        return {}
    return {name: rows for name, rows in found.items() if rows is not None}


def _found(headers: Iterable[tuple[Path, int, dict[str, Any]]], array: mx.array) -> FileRows | None:
    kinds = {
        kind
        for kind, (dtype, _) in _TYPES.items()
        if dtype == array.dtype or (array.dtype == mx.float32 and kind in ("F16", "BF16"))
    }
    for file, start, tensors in headers:
        for tensor in tensors.values():
            kind, shape = tensor["dtype"], tensor["shape"]
            if kind in kinds and shape == list(array.shape):
                rows = FileRows(file, start + tensor["data_offsets"][0], shape, kind)
                if rows.has(array):
                    return rows
    return None
