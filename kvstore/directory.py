"""The files of the kvstore: where a block lies, and how it is written atomically.

    <root>/lock                                          held while a kvstore owns the root
    <root>/nonce-<random>                                proof of a shared file system
    <root>/tmp/                                          half-written files; emptied at start
    <root>/quarantine/                                   the last few bad files, for inspection
    <root>/<namespace>/rank_0/<ab>/<hash>.safetensors    a block; its mtime is its last use

Nothing here keeps state about blocks: the directory is the source of truth.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import NamedTuple

from shared.blockfile import MAX_FILE_BYTES
from shared.hashing import HASH_BYTES
from shared.locks import try_lock

RANK = "rank_0"
SUFFIX = ".safetensors"
QUARANTINED_FILES = 8
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)

_NAMESPACE = re.compile(rf"[0-9a-f]{{{2 * HASH_BYTES}}}")
logger = logging.getLogger(__name__)


class DirectoryInUse(Exception):
    """Another kvstore owns the directory."""


class InvalidBlockKey(Exception):
    """Not the name of a block; as a path it might name another file."""


class BlockKey(NamedTuple):
    namespace: str
    hash: bytes

    @classmethod
    def checked(cls, namespace: str, hash: bytes) -> BlockKey:
        """Return a key whose parts are what the hashing of blocks makes.

        Raises: `InvalidBlockKey`, since nothing else may become part of a path.
        """
        if not _NAMESPACE.fullmatch(namespace):
            raise InvalidBlockKey(f"namespace {namespace[:80]!r}")
        if len(hash) != HASH_BYTES:
            raise InvalidBlockKey(f"a hash of {len(hash)} bytes")
        return cls(namespace, hash)


class FileInfo(NamedTuple):
    size: int
    last_used: float


class BlockDirectory:
    """The owner of ``root``, which is created if it does not exist.

    Raises: `DirectoryInUse` if another kvstore owns it, OSError if it cannot be used.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.expanduser().absolute()
        self._tmp = self.root / "tmp"
        self._quarantine = self.root / "quarantine"
        self._numbers = count()
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = self._acquire_lock()
        self._tmp.mkdir(mode=0o700, exist_ok=True)
        self._remove_leftovers()
        self.nonce = secrets.token_hex(16)
        self.nonce_path = self.root / f"nonce-{secrets.token_hex(8)}"
        self._write_nonce()

    def close(self) -> None:
        with suppress(OSError):
            self.nonce_path.unlink()
        os.close(self._lock)

    def path(self, key: BlockKey) -> Path:
        name = key.hash.hex()
        return Path(f"{self.root}/{key.namespace}/{RANK}/{name[:2]}/{name}{SUFFIX}")

    def info(self, key: BlockKey) -> FileInfo | None:
        try:
            status = self.path(key).stat()
        except OSError:
            return None
        if not stat.S_ISREG(status.st_mode):
            return None
        return FileInfo(status.st_size, status.st_mtime)

    def write(self, key: BlockKey, data: bytes, durable: bool) -> None:
        """Write the file whole or not at all; with ``durable`` it survives a power loss."""
        path = self.path(key)
        temporary = self._tmp / str(next(self._numbers))
        try:
            with temporary.open("wb") as file:
                file.write(data)
                if durable:
                    file.flush()
                    _sync(file.fileno())
            try:
                temporary.rename(path)
            except FileNotFoundError:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                temporary.rename(path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise
        if durable:
            for folder in (path.parent, *path.parent.parents[:3]):
                _sync_folder(folder)

    def read(self, key: BlockKey) -> bytes:
        if self.info(key) is None:  # opening a pipe of that name would block
            raise FileNotFoundError(self.path(key))
        with self.path(key).open("rb", buffering=0) as file:
            return file.read(MAX_FILE_BYTES)

    def remove(self, key: BlockKey) -> None:
        self.path(key).unlink(missing_ok=True)

    def set_last_used(self, key: BlockKey, at: float) -> None:
        with suppress(OSError):
            os.utime(self.path(key), (at, at))

    def quarantine(self, key: BlockKey) -> None:
        """Move a bad file to where no engine finds it; the last few are kept."""
        try:
            self._quarantine.mkdir(mode=0o700, exist_ok=True)
            self.path(key).rename(self._quarantine / f"{key.hash.hex()}.bad")
            kept = sorted(self._quarantine.iterdir(), key=lambda path: path.stat().st_mtime)
            for path in kept[:-QUARANTINED_FILES]:
                path.unlink()
        except OSError:
            self.remove(key)

    def scan(self) -> Iterator[tuple[BlockKey, FileInfo]]:
        """Yield every block in the directory, in no order.

        Entries that are not ours or cannot be read stay as they are; one log line counts them.
        """
        foreign: list[str] = []
        own = {"lock", "tmp", "quarantine", self.nonce_path.name}
        for namespace in _entries(str(self.root), foreign):
            if namespace.name in own:
                continue
            if not _NAMESPACE.fullmatch(namespace.name):
                foreign.append(namespace.path)
                continue
            for fan in _entries(f"{namespace.path}/{RANK}", foreign):
                for entry in _entries(fan.path, foreign):
                    found = self._identify(namespace.name, entry)
                    if found is None:
                        foreign.append(entry.path)
                    else:
                        yield found
        if foreign:
            logger.warning(
                "%d entries of %s are not readable blocks and are left alone (%s, ...)",
                len(foreign),
                self.root,
                foreign[0],
            )

    def _identify(
        self, namespace: str, entry: os.DirEntry[str]
    ) -> tuple[BlockKey, FileInfo] | None:
        try:
            key = BlockKey.checked(namespace, bytes.fromhex(entry.name.removesuffix(SUFFIX)))
            if entry.path != str(self.path(key)) or not entry.is_file(follow_symlinks=False):
                return None
            status = entry.stat(follow_symlinks=False)
        except (ValueError, InvalidBlockKey, OSError):
            return None
        return key, FileInfo(status.st_size, status.st_mtime)

    def _acquire_lock(self) -> int:
        lock = try_lock(self.root / "lock")
        if lock is None:
            raise DirectoryInUse(f"another kvstore uses {self.root}")
        return lock

    def _remove_leftovers(self) -> None:
        """Remove what a killed kvstore left. Safe, since this process holds the lock."""
        for path in (*self._tmp.iterdir(), *self.root.glob("nonce-*")):
            with suppress(OSError):
                path.unlink()

    def _write_nonce(self) -> None:
        try:
            self.nonce_path.write_text(self.nonce)
        except OSError as error:
            if error.errno not in DISK_FULL:
                raise
            # Without the nonce, engines get bytes instead of paths: slower, but correct.
            logger.warning("the disk of %s is full", self.root)


def _entries(path: str, unreadable: list[str]) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            return list(entries)
    except OSError:
        unreadable.append(path)
        return []


def _sync(fd: int) -> None:
    if hasattr(fcntl, "F_FULLFSYNC"):  # macOS: fsync leaves the data in the drive's cache
        fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
    else:
        os.fsync(fd)


def _sync_folder(folder: Path) -> None:
    """Sync the names in ``folder``, so that they are found again."""
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
