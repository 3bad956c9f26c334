"""Frames on the pipes of a process that works for another: a length (8 bytes) and bytes."""

from __future__ import annotations

import os
import struct
from typing import IO

LENGTH = struct.Struct("<Q")


def write_frames(pipe: IO[bytes], *frames: bytes | memoryview) -> None:
    """Write ``frames`` to an unbuffered ``pipe``."""
    for frame in frames:
        for part in (LENGTH.pack(len(frame)), frame):
            rest = memoryview(part)
            while rest:
                rest = rest[pipe.write(rest) :]


def read_frame(pipe: IO[bytes]) -> bytes:
    """Return the next frame. At the end of the input, end this process, whatever it does."""
    header = pipe.read(LENGTH.size)
    if len(header) < LENGTH.size:
        os._exit(0)
    return pipe.read(LENGTH.unpack(header)[0])
