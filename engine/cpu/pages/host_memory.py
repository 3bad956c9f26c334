"""Memory that is reserved at once and takes room where it is written."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

CAN_GIVE_BACK = sys.platform == "linux"
"""Whether parts of memory can be given back to the system, after which they read as zeros."""
NO_RESERVE = 0x4000 if sys.platform == "linux" else 0
"""Linux: do not count memory that was never written."""


class HostMemory:
    """Memory of ``size_bytes``, zero at first."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
        self._map = mmap.mmap(-1, max(1, size_bytes), flags=flags)
        if hasattr(mmap, "MADV_NOHUGEPAGE"):  # a huge page would fill gaps between heads
            self._map.madvise(mmap.MADV_NOHUGEPAGE)

    def array(self, shape: Sequence[int], dtype: Any, offset_bytes: int = 0) -> NDArray[Any]:
        """Return part of the memory as an array, which keeps the memory alive."""
        count = prod(shape)
        if not count:
            return np.empty(shape, dtype)
        # As long as there is such an array the memory does not move.
        return np.frombuffer(self._map, dtype, count, offset_bytes).reshape(shape)

    def resized(self, size_bytes: int) -> HostMemory:
        """Return memory of another size with the content of this one, which must not be used any
        more. On Linux nothing is copied if no array refers to it."""
        try:
            self._map.resize(max(1, size_bytes))
        except (BufferError, OSError, SystemError, ValueError):
            other = HostMemory(size_bytes)
            kept = min(size_bytes, self.size_bytes)
            other.array((kept,), np.uint8)[...] = self.array((kept,), np.uint8)
            return other
        self.size_bytes = size_bytes
        return self

    def give_back(self, start: int, size_bytes: int) -> bool:
        """Give whole pages of the system back, which then read as zeros. Return False if that is
        not possible here."""
        if not CAN_GIVE_BACK or start % mmap.PAGESIZE or size_bytes % mmap.PAGESIZE:
            return False
        self._map.madvise(mmap.MADV_DONTNEED, start, size_bytes)
        return True
