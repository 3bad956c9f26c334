"""Frames on the pipes of a process that works for another: a length (8 bytes) and bytes."""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from typing import IO

LENGTH = struct.Struct("<Q")


def framed(frames: Sequence[bytes | memoryview]) -> list[memoryview]:
    """Return ``frames``, each behind its length, as buffers to write."""
    return [memoryview(part) for each in frames for part in (LENGTH.pack(len(each)), each)]


def write_some(fd: int, buffers: list[memoryview]) -> list[memoryview]:
    """Write ``buffers``, or the part of them for which a pipe has room, with one call: each call
    wakes the process at the other end. Return what is left. Raises what `os.writev` raises."""
    count = os.writev(fd, buffers)
    for number, each in enumerate(buffers):
        if count < len(each):
            return [each[count:], *buffers[number + 1 :]]
        count -= len(each)
    return []


def write_frames(pipe: IO[bytes], *frames: bytes | memoryview) -> None:
    """Write ``frames`` to an unbuffered ``pipe``."""
    rest = framed(frames)
    while rest:
        rest = write_some(pipe.fileno(), rest)


def read_frame(pipe: IO[bytes]) -> bytes:
    """Return the next frame. At the end of the input, end this process, whatever it does."""
    header = pipe.read(LENGTH.size)
    if len(header) < LENGTH.size:
        os._exit(0)
    return pipe.read(LENGTH.unpack(header)[0])
