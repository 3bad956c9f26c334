from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from kvstore.directory import (
    QUARANTINED_FILES,
    BlockDirectory,
    BlockKey,
    DirectoryInUse,
    InvalidBlockKey,
)
from tests.kvstore.blocks import NAMESPACE, file_of, hash_of, key_of


@pytest.mark.parametrize(
    ("namespace", "hash"),
    [
        ("../../etc", hash_of(1)),
        ("..", hash_of(1)),
        ("", hash_of(1)),
        (NAMESPACE + "\n", hash_of(1)),
        (NAMESPACE[:-1] + "/", hash_of(1)),
        (NAMESPACE.upper(), hash_of(1)),
        (NAMESPACE, b""),
        (NAMESPACE, hash_of(1) + b"x"),
    ],
)
def test_an_invalid_block_key_never_becomes_a_path(namespace: str, hash: bytes) -> None:
    with pytest.raises(InvalidBlockKey):
        BlockKey.checked(namespace, hash)


def test_a_disk_that_became_read_only_can_be_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    BlockDirectory(tmp_path).close()
    real_open = os.open

    def read_only(path: Path, flags: int, *mode: int) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real_open(path, flags, *mode)

    monkeypatch.setattr(os, "open", read_only)
    directory = BlockDirectory(tmp_path)
    with pytest.raises(DirectoryInUse):
        BlockDirectory(tmp_path)
    directory.close()


def test_leftovers_of_a_crash_are_removed_at_start(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp" / "17").write_bytes(b"half a block")
    (tmp_path / "nonce-dead").write_text("old")
    directory = BlockDirectory(tmp_path)
    assert list((tmp_path / "tmp").iterdir()) == []
    assert [path.name for path in tmp_path.glob("nonce-*")] == [directory.nonce_path.name]
    directory.close()
    assert not directory.nonce_path.exists()


@pytest.mark.parametrize("durable", [True, False])
def test_a_scan_finds_written_blocks_and_keeps_foreign_files(tmp_path: Path, durable: bool) -> None:
    directory = BlockDirectory(tmp_path)
    for number in range(3):
        directory.write(key_of(number), file_of(number), 0.0, durable)
    foreign = [
        tmp_path / "README",
        tmp_path / "photos" / "cat.jpg",
        directory.path(key_of(0)).with_name("notes.txt"),
        directory.path(key_of(0)).with_name("ff" * 16 + ".safetensors"),  # wrong fan-out
    ]
    for path in foreign:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    directory.path(key_of(9)).mkdir()
    assert {key: info.size for key, info in directory.scan()} == {
        key_of(number): len(file_of(number)) for number in range(3)
    }
    assert all(path.read_text() == "mine" for path in foreign)
    directory.close()


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    directory = BlockDirectory(tmp_path)
    directory.path(key_of(1)).mkdir(parents=True)  # a rename onto it fails
    with pytest.raises(OSError):
        directory.write(key_of(1), file_of(1), 0.0, durable=False)
    assert list((tmp_path / "tmp").iterdir()) == []
    directory.close()


def test_the_quarantine_keeps_only_the_last_few(tmp_path: Path) -> None:
    directory = BlockDirectory(tmp_path)
    for number in range(QUARANTINED_FILES + 3):
        directory.write(key_of(number), b"bad", 0.0, durable=False)
        os.utime(directory.path(key_of(number)), (number, number))
        directory.quarantine(key_of(number))
        assert directory.info(key_of(number)) is None
    kept = {path.stem for path in (tmp_path / "quarantine").iterdir()}
    assert kept == {hash_of(number).hex() for number in range(3, QUARANTINED_FILES + 3)}
    directory.close()
