"""Rows of embeddings, looked up in the files of their checkpoint.

A process needs few rows at a time. Mapped files take none of its memory: what the system has read
of them it may drop, and read again.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

_TYPES = {
    mx.float32: ("F32", mx.uint32),
    mx.float16: ("F16", mx.uint16),
    mx.bfloat16: ("BF16", mx.uint16),
    mx.uint32: ("U32", mx.uint32),
    mx.uint8: ("U8", mx.uint8),
}
"""Names of types in safetensors, and as many bits as integers: NumPy has no bfloat16."""
_ROWS_AT_ONCE = 4096


class FilesChanged(Exception):
    """A file of the model was written to while it is served: nothing can be computed any more."""


class FileRows:
    """The rows of one array, in the file that it was loaded from."""

    def __init__(self, file: Path, start: int, array: mx.array) -> None:
        """``start``: where the content of ``array`` should begin in ``file``, in bytes."""
        self._file, self._dtype = file.open("rb"), array.dtype
        self._state = self._found_state()
        self._map = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
        bits = _bits(array)
        self._array = np.frombuffer(self._map, bits.dtype, bits.size, start).reshape(bits.shape)

    def has(self, array: mx.array) -> bool:
        """Return whether the file has the content of ``array``."""
        bits, pieces = _bits(array), range(0, array.shape[0], _ROWS_AT_ONCE)
        places = (slice(start, start + _ROWS_AT_ONCE) for start in pieces)
        same = all(np.array_equal(self._array[place], bits[place]) for place in places)
        self._map.madvise(mmap.MADV_DONTNEED)  # what was read is not the process's any more
        return same

    def __getitem__(self, numbers: NDArray[Any]) -> mx.array:
        """Return these rows. Raises `FilesChanged`."""
        if self._found_state() != self._state:
            raise FilesChanged(f"{self._file.name} was changed while its model is served")
        return mx.array(self._array[numbers]).view(self._dtype)

    def _found_state(self) -> tuple[int, int]:
        found = os.fstat(self._file.fileno())
        return found.st_mtime_ns, found.st_size


def find(files: Sequence[Path], array: mx.array) -> FileRows | None:
    """Return the rows of ``array`` in the one of these safetensors ``files`` that has it, whatever
    its name is there; None if none has it as it is in memory."""
    try:
        found = (FileRows(file, start, array) for file, start in _places(files, array))
        return next((rows for rows in found if rows.has(array)), None)
    except (OSError, ValueError):  # files that cannot be mapped, or were cut off
        return None


def _places(files: Sequence[Path], array: mx.array) -> Iterator[tuple[Path, int]]:
    """Yield files, and where arrays of this type and shape begin in them."""
    if array.dtype not in _TYPES:
        return
    kind = _TYPES[array.dtype][0], list(array.shape)
    for path in files:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        for tensor in header.values():
            if (tensor["dtype"], tensor["shape"]) == kind:
                yield path, 8 + length + tensor["data_offsets"][0]


def _bits(array: mx.array) -> NDArray[Any]:
    return np.asarray(array.view(_TYPES[array.dtype][1]))
