"""The files of the kvstore: where a block is stored, and how it is written atomically.

    <root>/lock                                          held while a kvstore owns the root
    <root>/clock                                         the time by which blocks age
    <root>/nonce-<random>                                proof of a shared file system
    <root>/tmp/                                          half-written files; emptied at start
    <root>/quarantine/                                   the last few bad files, for inspection
    <root>/<digits>/rank_<n>/<ab>/<hash>.safetensors     a block; its mtime is its last use

A namespace is the digits, and for ranks other than 0 the folder of the rank too
(`shared.hashing.rank_namespace`).

Nothing here keeps state about blocks: the directory is the source of truth.
"""

from __future__ import annotations

import errno
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

from kvstore.disk import DISK_FULL, OF_NO_FILE, Disk
from shared.blockfile import MAX_FILE_BYTES
from shared.hashing import HASH_BYTES, rank_namespace, split_namespace
from shared.locks import try_lock
from shared.watched_file import names

SUFFIX = ".safetensors"
QUARANTINED_FILES = 8

_OWN = ("lock", "clock", "tmp", "quarantine")
_NONCE = "nonce-"
_DIGITS = re.compile(rf"[0-9a-f]{{{2 * HASH_BYTES}}}")
_NAMESPACE = re.compile(rf"{_DIGITS.pattern}(/rank_[1-9][0-9]{{0,2}})?")
_RANK = re.compile("rank_(0|[1-9][0-9]{0,2})")
logger = logging.getLogger(__name__)


class DirectoryInUse(Exception):
    """Another kvstore owns the directory."""


class InvalidBlockKey(ValueError):
    """Not the name of a block; as a path it could refer to another file."""


class BlockKey(NamedTuple):
    namespace: str
    hash: bytes

    @classmethod
    def checked(cls, namespace: str, hash: bytes) -> BlockKey:
        """Return a key made only of parts that block hashing produces.

        Raises: `InvalidBlockKey`, because nothing else may become part of a path.
        """
        if not _NAMESPACE.fullmatch(namespace):
            raise InvalidBlockKey(f"invalid namespace {namespace[:80]!r}")
        if len(hash) != HASH_BYTES:
            raise InvalidBlockKey(f"invalid hash of {len(hash)} bytes")
        return cls(namespace, hash)


class FileInfo(NamedTuple):
    size: int
    last_used: float


class BlockDirectory:
    """Own ``root``, which is created if it does not exist.

    Raises: `DirectoryInUse` if another kvstore owns it, OSError if it is not usable.
    """

    def __init__(self, root: Path, disk: Disk | None = None) -> None:
        self.root = root.expanduser().absolute()
        self._disk = disk or Disk()
        self._tmp = self.root / "tmp"
        self._quarantine = self.root / "quarantine"
        self._clock = self.root / "clock"
        self._numbers = count()
        self._synced_fans: set[Path] = set()
        """Folders whose names are known to be durable."""
        self.quarantined_bytes = 0
        """Size of the quarantine on disk."""
        self._lock = -1
        self._open()

    def close(self) -> None:
        with suppress(OSError):
            self._disk.unlink(self.nonce_path)
        os.close(self._lock)
        self._lock = -1

    def path(self, key: BlockKey) -> Path:
        return block_path(self.root, key)

    def info(self, key: BlockKey) -> FileInfo | None:
        try:
            status = self.path(key).stat()
        except OSError:
            return None
        if not stat.S_ISREG(status.st_mode):
            return None
        return FileInfo(status.st_size, status.st_mtime)

    def write(self, key: BlockKey, data: bytes, last_used: float, durable: bool) -> None:
        """Write the file atomically; with ``durable``, it survives a power loss."""
        path = self.path(key)
        self._replace(path, data, last_used, durable)
        if durable:
            self._sync_folders(path)

    def sync(self, key: BlockKey) -> None:
        """Make an existing block durable."""
        path = self.path(key)
        self._disk.sync_file(path)
        self._sync_folders(path)

    def read(self, key: BlockKey) -> bytes:
        if self.info(key) is None:  # opening a pipe with that name would block
            raise FileNotFoundError(self.path(key))
        return self._disk.read(self.path(key), MAX_FILE_BYTES)

    def remove(self, key: BlockKey) -> None:
        self._disk.unlink(self.path(key))

    def set_last_used(self, key: BlockKey, at: float) -> None:
        with suppress(OSError):
            self._disk.set_last_used(self.path(key), at)

    def quarantine(self, key: BlockKey) -> None:
        """Move a bad file to the quarantine, where no engine finds it. The last few are kept."""
        try:
            self._quarantine.mkdir(mode=0o700, exist_ok=True)
            kept = self._quarantine / f"{key.hash.hex()}.bad"
            self._disk.rename(self.path(key), kept)
        except OSError:
            self.remove(key)
        self._thin_quarantine(QUARANTINED_FILES)

    def empty_quarantine(self) -> None:
        self._thin_quarantine(0)

    def free_bytes(self) -> int:
        return self._disk.free_bytes(self.root)

    def read_clock(self) -> bytes | None:
        """Return what `write_clock` wrote last, or None."""
        try:
            return self._clock.read_bytes()
        except OSError:
            return None

    def write_clock(self, saved: bytes, at: float) -> None:
        with suppress(OSError):
            self._replace(self._clock, saved, at, durable=False)

    def check_writable(self, size: int) -> None:
        """Write a file of ``size`` bytes and delete it. Raises: OSError."""
        self._tmp.mkdir(mode=0o700, exist_ok=True)
        self._disk.unlink(self._write_temporary(bytes(size), 0.0, durable=True))

    # -- a directory that vanishes ---------------------------------------------

    def is_there(self) -> bool:
        """Return False if the directory is gone or replaced by another one."""
        return names(self.root / "lock", os.fstat(self._lock))

    def reopen(self) -> bool:
        """Own the directory again after it was gone. Return False if that is not possible yet.

        It is not created if its disk is missing, because that would fill another disk.
        """
        try:
            if not (self.root / "lock").exists() and self._device_below() != self._device:
                return False
            old = self._lock
            self._open()
        except (OSError, DirectoryInUse):
            return False
        os.close(old)
        return True

    def _open(self) -> None:
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = try_lock(self.root / "lock")
        if lock is None:
            raise DirectoryInUse(f"another kvstore uses {self.root}")
        try:
            self._tmp.mkdir(mode=0o700, exist_ok=True)
            self._remove_leftovers()
            self.nonce = secrets.token_hex(16)
            self.nonce_path = self.root / f"{_NONCE}{secrets.token_hex(8)}"
            self._write_nonce()
            self._thin_quarantine(QUARANTINED_FILES)
            self._device = self.root.stat().st_dev
        except BaseException:
            os.close(lock)
            raise
        self._lock = lock
        self._synced_fans.clear()

    def _device_below(self) -> int:
        """Return the device on which the directory would be created."""
        for path in (self.root, *self.root.parents):
            with suppress(FileNotFoundError):
                return path.stat().st_dev
        return -1

    # -- all blocks ------------------------------------------------------------

    def scan(self) -> Iterator[tuple[BlockKey, FileInfo]]:
        """Yield every block in the directory, in no particular order.

        Entries that are not blocks or cannot be read are left alone and counted in one log line.
        Raises: an OSError of `OF_NO_FILE`, because blocks would be missing.
        """
        foreign: list[str] = []
        yield from scan_blocks(self.root, foreign)
        if foreign:
            logger.warning(
                "ignored %d entries of %s that are not readable blocks (%s, ...)",
                len(foreign),
                self.root,
                foreign[0],
            )

    def scan_namespace(self, namespace: str) -> Iterator[tuple[BlockKey, FileInfo]]:
        """Like `scan`, for one namespace."""
        digits, rank = split_namespace(namespace)
        yield from _scan_folder(f"{self.root}/{digits}/rank_{rank}", namespace, [])

    # -- inside ----------------------------------------------------------------

    def _replace(self, path: Path, data: bytes, last_used: float, durable: bool) -> None:
        temporary = self._write_temporary(data, last_used, durable)
        try:
            try:
                self._disk.rename(temporary, path)
            except FileNotFoundError:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._disk.rename(temporary, path)
        except OSError:
            with suppress(OSError):
                self._disk.unlink(temporary)
            raise

    def _write_temporary(self, data: bytes, last_used: float, durable: bool) -> Path:
        temporary = self._tmp / str(next(self._numbers))
        try:
            self._disk.create(temporary, data, last_used, durable)
        except OSError:
            with suppress(OSError):
                self._disk.unlink(temporary)
            raise
        return temporary

    def _sync_folders(self, path: Path) -> None:
        """Make the names of the file and of its parent folders durable."""
        fan, *above = path.parents[:4]  # of rank and namespace, and the root
        self._disk.sync_folder(fan)
        if fan not in self._synced_fans:
            for folder in above:
                self._disk.sync_folder(folder)
            self._synced_fans.add(fan)

    def _thin_quarantine(self, kept: int) -> None:
        """Delete all but the newest ``kept`` files in the quarantine."""
        found: list[tuple[float, int, Path]] = []
        with suppress(OSError):
            for path in self._quarantine.iterdir():
                status = path.lstat()
                found.append((status.st_mtime, status.st_size, path))
        found.sort(reverse=True)
        for number, (_, _, path) in enumerate(found):
            if number >= kept:
                with suppress(OSError):
                    self._disk.unlink(path)
        self.quarantined_bytes = sum(size for _, size, path in found if path.exists())

    def _remove_leftovers(self) -> None:
        """Delete temporary files of a killed kvstore. Safe because this process holds the lock."""
        for path in (*self._tmp.iterdir(), *self.root.glob("nonce-*")):
            with suppress(OSError):
                self._disk.unlink(path)

    def _write_nonce(self) -> None:
        try:
            self.nonce_path.write_text(self.nonce)
        except OSError as error:
            if error.errno not in (*DISK_FULL, errno.EROFS):
                raise
            # Without the nonce, engines receive bytes instead of paths: slower, but correct.
            logger.warning("cannot write to the disk of %s: %s", self.root, error)


def scan_blocks(root: Path, foreign: list[str]) -> Iterator[tuple[BlockKey, FileInfo]]:
    """Yield every block below ``root``, in no particular order, whoever owns it. The paths of other
    entries are added to ``foreign``."""
    for namespace in _entries(str(root), foreign):
        if namespace.name in _OWN or namespace.name.startswith(_NONCE):
            continue
        if not _DIGITS.fullmatch(namespace.name):
            foreign.append(namespace.path)
            continue
        for rank in _entries(namespace.path, foreign):
            if not _RANK.fullmatch(rank.name):
                foreign.append(rank.path)
                continue
            name = rank_namespace(namespace.name, int(rank.name.removeprefix("rank_")))
            yield from _scan_folder(rank.path, name, foreign)


def block_path(root: Path, key: BlockKey) -> Path:
    name = key.hash.hex()
    digits, rank = split_namespace(key.namespace)
    return Path(f"{root}/{digits}/rank_{rank}/{name[:2]}/{name}{SUFFIX}")


def _scan_folder(
    path: str, namespace: str, foreign: list[str]
) -> Iterator[tuple[BlockKey, FileInfo]]:
    for fan in _entries(path, foreign):
        for entry in _entries(fan.path, foreign):
            found = _identify(namespace, fan.name, entry)
            if found is None:
                foreign.append(entry.path)
            else:
                yield found


def _identify(
    namespace: str, fan: str, entry: os.DirEntry[str]
) -> tuple[BlockKey, FileInfo] | None:
    name = entry.name.removesuffix(SUFFIX)
    try:
        key = BlockKey.checked(namespace, bytes.fromhex(name))
        if name != key.hash.hex() or fan != name[:2] or not entry.name.endswith(SUFFIX):
            return None
        status = entry.stat(follow_symlinks=False)
    except (ValueError, InvalidBlockKey, OSError):
        return None
    if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_FILE_BYTES:
        return None
    return key, FileInfo(status.st_size, status.st_mtime)


def _entries(path: str, unreadable: list[str]) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            return list(entries)
    except OSError as error:
        if error.errno in OF_NO_FILE:
            raise
        unreadable.append(path)
        return []
