"""Files that may change or go while they are used."""

from __future__ import annotations

from pathlib import Path

from shared.watched_file import OpenedFile


def test_a_file_is_there_until_its_path_names_another_or_none(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "file"
    path.parent.mkdir()
    file = OpenedFile(path)
    assert file.is_there
    path.rename(tmp_path / "kept")
    assert not file.is_there
    path.write_text("another")
    assert not file.is_there
    path.unlink()
    (tmp_path / "kept").rename(path)
    assert file.is_there
    path.unlink()
    path.parent.rmdir()
    assert not file.is_there
    path.parent.write_text("no folder")
    assert not file.is_there


def test_a_path_that_cannot_be_followed_is_left_to_reads_and_writes(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "file"
    path.parent.mkdir()
    file = OpenedFile(path)
    path.parent.rename(tmp_path / "kept")
    path.parent.symlink_to(path.parent)  # an endless one
    assert file.is_there
