"""The header of a safetensors file, which lists its tensors, and their 16-bit types."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_MAX_BYTES = 100 << 20


def read_header(path: Path, max_bytes: int = _MAX_BYTES) -> tuple[int, dict[str, Any]]:
    """Return the offset in bytes of the first tensor and, by name, the header's entry of each
    tensor: ``dtype``, ``shape`` and ``data_offsets`` relative to that offset.

    Raises: OSError, and ValueError if there is no header of at most ``max_bytes``.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > max_bytes:
            raise ValueError(f"{path} is not a safetensors file")
        text = file.read(length)
    try:
        header = json.loads(text)
    except RecursionError:
        header = None
    if not isinstance(header, dict):
        raise ValueError(f"{path} is not a safetensors file")
    header.pop("__metadata__", None)
    return 8 + length, header


def as_fp32(kind: str, stored: NDArray[Any]) -> NDArray[np.float32]:
    """Return floats of the type ``kind`` in fp32. NumPy has no bfloat16: ``stored`` has its bits,
    as uint16."""
    if kind == "BF16":
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float32)
