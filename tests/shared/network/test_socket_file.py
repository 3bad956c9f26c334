from __future__ import annotations

import socket
from pathlib import Path

import pytest

from shared.network.socket_file import SocketFile, SocketFileError


def test_an_address_belongs_to_one_process_until_it_is_given_up(socket_dir: Path) -> None:
    path = socket_dir / "s"
    first = SocketFile(f"ipc://{path}")
    for _ in range(2):  # before and after it is bound
        with pytest.raises(SocketFileError, match=f"cannot bind ipc://{path}: another process use"):
            SocketFile(f"ipc://{path}")
        if not path.exists():
            bound = socket.socket(socket.AF_UNIX)
            bound.bind(str(path))
    bound.close()
    first.remove()
    assert not path.exists()
    SocketFile(f"ipc://{path}").remove()


def test_the_address_of_another_program_is_taken_once_it_has_ended(socket_dir: Path) -> None:
    path = socket_dir / "s"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen(0)
        with pytest.raises(SocketFileError, match="another process uses it"):
            SocketFile(f"ipc://{path}")
    SocketFile(f"ipc://{path}").remove()


def test_a_file_that_is_not_a_socket_is_never_deleted(socket_dir: Path) -> None:
    path = socket_dir / "notes"
    path.write_text("mine")
    link = socket_dir / "link"
    link.symlink_to(path)
    for each in (path, link):
        with pytest.raises(SocketFileError, match=f"cannot bind ipc://{each}: it exists, and is"):
            SocketFile(f"ipc://{each}")
    path.unlink()
    link.unlink()
    file = SocketFile(f"ipc://{path}")
    path.write_text("mine")  # in place of the socket
    file.remove()
    assert {each.name for each in socket_dir.iterdir()} == {"notes", "notes.lock"}


def test_an_address_that_cannot_be_reserved_is_refused_with_the_reason(socket_dir: Path) -> None:
    with pytest.raises(SocketFileError, match=r"cannot bind ipc://.*: No such file or directory"):
        SocketFile(f"ipc://{socket_dir}/none/s")
    SocketFile("tcp://127.0.0.1:1").remove()
