"""Maintenance of a kvstore's directory: list, verify, clear, export and import.

Reading needs no lock, because files are written atomically and never change. Clearing and importing
take ownership of the directory: a running kvstore would not notice the changes.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kvstore.directory import BlockDirectory, BlockKey, FileInfo, block_path, scan_blocks
from shared.blockfile import MAX_FILE_BYTES, BlockFileError, decode

_LATEST = 2.0**40  # as a time, in seconds


@dataclass
class NamespaceFigures:
    """The blocks of one namespace: one model with one kind of cache."""

    blocks: int = 0
    bytes: int = 0
    last_used: float = 0.0
    """In seconds of the kvstore's own clock, as stored in the files."""


@dataclass
class Outcome:
    """The number of blocks processed, their size in bytes, and the names of those that failed."""

    blocks: int = 0
    bytes: int = 0
    bad: list[str] = field(default_factory=list)

    def add(self, size: int) -> None:
        self.blocks += 1
        self.bytes += size


def list_namespaces(root: Path) -> dict[str, NamespaceFigures]:
    found: dict[str, NamespaceFigures] = {}
    for key, info in _scan(root):
        figures = found.setdefault(key.namespace, NamespaceFigures())
        figures.blocks += 1
        figures.bytes += info.size
        figures.last_used = max(figures.last_used, info.last_used)
    return found


def verify(root: Path, namespace: str | None = None) -> Outcome:
    """Read every block and check it against its name and checksum."""
    outcome = Outcome()
    for key, _ in _scan(root, namespace):
        data = _read(root, key)
        if data is not None and _is_good(key, data):
            outcome.add(len(data))
        elif data is not None:
            outcome.bad.append(_name(key))
    return outcome


def clear(root: Path, namespace: str | None = None) -> Outcome:
    """Delete all blocks. Raises: `DirectoryInUse` while a kvstore runs, OSError."""
    directory = BlockDirectory(root)
    outcome = Outcome()
    try:
        for key, info in list(_scan(root, namespace)):
            directory.remove(key)
            outcome.add(info.size)
    finally:
        directory.close()
    return outcome


def export_blocks(root: Path, archive: Path, namespace: str | None = None) -> Outcome:
    """Write the valid blocks to a tar file, which appears once it is complete. Raises: OSError."""
    outcome = Outcome()
    aside = archive.with_name(archive.name + ".part")
    try:
        with tarfile.open(aside, "w") as tar:
            for key, info in _scan(root, namespace):
                data = _read(root, key)
                if data is None:
                    continue  # evicted in the meantime
                if not _is_good(key, data):
                    outcome.bad.append(_name(key))
                    continue
                member = tarfile.TarInfo(_name(key))
                member.size, member.mtime = len(data), int(info.last_used)
                tar.addfile(member, io.BytesIO(data))
                outcome.add(len(data))
        aside.replace(archive)
    finally:
        aside.unlink(missing_ok=True)
    return outcome


def import_blocks(root: Path, archive: Path) -> Outcome:
    """Add the blocks from a tar file written by `export_blocks`; existing blocks are kept.

    Members whose name or content is not a block's are skipped and reported as bad. Raises:
    `DirectoryInUse` while a kvstore runs, `tarfile.TarError`, OSError.
    """
    outcome = Outcome()
    directory = BlockDirectory(root)
    try:
        with tarfile.open(archive, "r:") as tar:
            for member in tar:
                key, data = _key(member.name), b""
                file = tar.extractfile(member) if member.isreg() else None
                if file is not None and member.size <= MAX_FILE_BYTES:
                    data = file.read()
                if key is None or not _is_good(key, data):
                    outcome.bad.append(member.name[:200])
                elif directory.info(key) is None:
                    directory.write(key, data, _last_used(member), durable=False)
                    outcome.add(len(data))
    except ValueError as error:  # tarfile reads numbers of sparse files without a check
        raise tarfile.ReadError(str(error)) from None
    finally:
        directory.close()
    return outcome


def _scan(root: Path, namespace: str | None = None) -> Iterator[tuple[BlockKey, FileInfo]]:
    for key, info in scan_blocks(root, []):
        if namespace in (None, key.namespace):
            yield key, info


def _read(root: Path, key: BlockKey) -> bytes | None:
    try:
        return block_path(root, key).read_bytes()
    except OSError:
        return None


def _last_used(member: tarfile.TarInfo) -> float:
    """Return the time of use in an archive; 0 if it is invalid, because the archive may be
    untrusted."""
    at = float(member.mtime)
    return at if 0 <= at < _LATEST else 0.0


def _is_good(key: BlockKey, data: bytes) -> bool:
    try:
        decode(data, key.hash, key.namespace)
    except BlockFileError:
        return False
    return True


def _name(key: BlockKey) -> str:
    return f"{key.namespace}/{key.hash.hex()}"


def _key(name: str) -> BlockKey | None:
    """Return the block named by `_name`; None for any other name."""
    namespace, _, digits = name.rpartition("/")
    try:
        key = BlockKey.checked(namespace, bytes.fromhex(digits))
    except ValueError:
        return None
    return key if _name(key) == name else None
