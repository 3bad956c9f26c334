"""Fetches of blocks from the kvstore: the requested run, and the reading of replies."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.plan import Cancellation
from shared.blockfile import MAX_FILE_BYTES, BlockFileError, decode

Payload = tuple[memoryview, ...]


class WrongLayout(Exception):
    """A valid file of an engine that stores blocks differently."""


@dataclass(frozen=True)
class FileKind:
    """The kind of the files in one namespace: blocks or states."""

    namespace: str
    sizes: tuple[int, ...] = ()  # bytes of the buffers of a file; none: unknown


@dataclass(eq=False)
class BlockFetch:
    """A run of files to fetch."""

    kind: FileKind
    hashes: tuple[bytes, ...]
    on_done: Callable[[list[Payload]], None]
    """Called once, on the IO thread, with the result, starting at the first hash."""
    cancellation: Cancellation | None = None
    deadline: float = 0.0  # in time.monotonic(); later if blocks of any fetch are being read
    get_ticket: int = 0  # ticket of the current `wire.Get`
    payloads: list[Payload] = field(default_factory=list)
    """Verified blocks, starting at the first hash. Written by the IO thread only."""
    is_done: bool = False
    """Whether the fetch has been answered. Written by the IO thread only."""


class FetchReply:
    """The blocks of one reply of the kvstore, which the pool reads in parallel.

    ``sources`` are paths of block files, or their bytes. With ``may_be_cut``, the kvstore may have
    more of the requested blocks.
    """

    def __init__(self, fetch: BlockFetch, sources: Sequence[str | bytes], may_be_cut: bool) -> None:
        self.fetch = fetch
        self.sources = sources
        self._may_be_cut = may_be_cut
        self._first = len(fetch.payloads)
        self._payloads: list[Payload | None] = [None] * len(sources)
        self._first_bad = self._num_unread = len(sources)
        self._lock = threading.Lock()

    def hash_of(self, index: int) -> bytes:
        return self.fetch.hashes[self._first + index]

    def wants(self, index: int) -> bool:
        """Return False if block ``index`` need not be read, because it would follow a bad one or
        nobody waits for it."""
        cancellation = self.fetch.cancellation
        is_cancelled = cancellation is not None and cancellation.is_set
        return not (self.fetch.is_done or is_cancelled) and index < self._first_bad

    def add(self, index: int, payload: Payload | None) -> bool:
        """Record the payload of block ``index``, None for a bad one; True if it was the last."""
        with self._lock:
            self._payloads[index] = payload
            if payload is None:
                self._first_bad = min(self._first_bad, index)
            self._num_unread -= 1
            return self._num_unread == 0

    def good_payloads(self) -> list[Payload]:
        """Return the payloads before the first bad block."""
        return [payload for payload in self._payloads[: self._first_bad] if payload]

    def has_more(self) -> bool:
        """Return whether the kvstore may have the blocks after those of this reply."""
        return self._may_be_cut and self._first_bad == len(self._payloads)


def read_block(source: str | bytes, hash: bytes, kind: FileKind) -> Payload | None:
    """Return the verified payload in ``source``, the path of a block file or its bytes.

    None if the file is gone because it was evicted. Raises: OSError, BlockFileError, WrongLayout.
    """
    try:
        data = read_file(source, MAX_FILE_BYTES) if isinstance(source, str) else source
        payload = decode(data, hash, kind.namespace)
    except FileNotFoundError:
        return None
    sizes = tuple(buffer.nbytes for buffer in payload)
    if kind.sizes and sizes != kind.sizes:
        raise WrongLayout(f"buffers of {sizes} bytes, expected {kind.sizes}")
    return payload


def read_file(path: str, limit_bytes: int) -> bytes:
    """Return a complete file, which is read: a mapped file could crash the engine with SIGBUS."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        size = os.fstat(fd).st_size
        if size > limit_bytes:
            raise BlockFileError(f"{path} has {size} bytes")
        return os.pread(fd, size, 0)
    finally:
        os.close(fd)
