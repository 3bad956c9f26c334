"""The private directory with the sockets."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from shared import rundir
from shared.locks import try_lock
from shared.rundir import (
    FRESH_S,
    MAX_SOCKET_PATH_BYTES,
    RunDir,
    RunDirError,
    remove_if_abandoned,
    sweep,
)

ROOT = Path(__file__).resolve().parents[2]

HOLDER = """
import sys
from pathlib import Path
from shared.rundir import RunDir
run_dir = RunDir.create(Path(sys.argv[1]))
print(run_dir.path, flush=True)
sys.stdin.read()
"""


def hold(parent: Path) -> tuple[subprocess.Popen[str], Path]:
    """Start a process that holds a run directory in ``parent``."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(parent)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_the_directory_is_private_has_a_short_path_and_is_removed() -> None:
    with RunDir.create() as run_dir:
        assert stat.S_IMODE(run_dir.path.stat().st_mode) == 0o700
        address = run_dir.socket("engines")
        assert len(address.removeprefix("ipc://")) <= MAX_SOCKET_PATH_BYTES
        Path(address.removeprefix("ipc://")).touch()
    assert not run_dir.path.exists()


def test_a_parent_with_too_long_a_path_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with RunDir.create() as run_dir:
        assert run_dir.path.parent == Path("/tmp")


def test_the_directory_of_a_running_server_is_not_removed(tmp_path: Path) -> None:
    process, path = hold(tmp_path)
    with process:
        assert not remove_if_abandoned(path)
        assert sweep(tmp_path) == 0
        assert path.is_dir()
        process.kill()


def test_the_directory_of_a_killed_server_is_removed_at_the_next_start(tmp_path: Path) -> None:
    process, path = hold(tmp_path)
    with process:
        process.kill()
    (path / "engines").touch()
    other = tmp_path / "mlxlm-of-somebody-else"
    other.mkdir()
    with RunDir.create(tmp_path) as run_dir:
        assert not path.exists()
        assert sorted(tmp_path.iterdir()) == sorted([other, run_dir.path])


def test_servers_that_start_at_the_same_time_do_not_remove_the_directory_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock = fcntl.flock
    swept: list[int] = []

    def late(descriptor: int, operation: int) -> None:
        if not swept:
            swept.append(0)
            swept[0] = sweep(tmp_path)
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with RunDir.create(tmp_path) as run_dir:
        assert swept == [0] and run_dir.path.is_dir()
        assert sweep(tmp_path) == 0
        assert [file.name for file in run_dir.path.iterdir()] == ["lock"]


def test_a_missing_directory_is_not_removed(tmp_path: Path) -> None:
    assert not remove_if_abandoned(tmp_path / "never")


def test_a_parent_that_cannot_be_written_raises_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(RunDirError, match=r"no private directory for sockets: .*: No such file"):
        RunDir.create(tmp_path / os.urandom(4).hex())


def test_one_that_cannot_be_written_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """/proc, where access rights allow root to."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/proc")
    with RunDir.create() as run_dir:
        assert run_dir.path.parent == Path(tempfile.gettempdir())


_READ_ONLY = """for each in /tmp /var/tmp; do
  mount --bind $each $each; mount -o remount,bind,ro $each
done
exec "$@"
"""


@pytest.mark.skipif(sys.platform != "linux", reason="with namespaces of Linux")
def test_a_server_outlives_the_login_whose_directory_is_removed_at_its_end(
    monkeypatch: pytest.MonkeyPatch, socket_dir: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(socket_dir))
    monkeypatch.setattr(os, "getuid", lambda: 4321)
    for given in ("/run/user/4321", "/run/user/4321/"):
        monkeypatch.setenv("XDG_RUNTIME_DIR", given)
        assert rundir._bases() == [socket_dir, Path("/tmp"), Path("/run/user/4321")]
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/4321/mine")
    assert rundir._bases()[0] == Path("/run/user/4321/mine")


def test_a_machine_that_cannot_be_written_is_told_in_one_line() -> None:
    """As a container with a read-only root: no folder of those that Python knows can be used."""
    isolated = ["unshare", "--map-root-user", "--mount", "bash", "-ec"]
    if subprocess.run([*isolated, _READ_ONLY, "bash", "true"], check=False).returncode:
        pytest.skip("this machine allows no mounts in a namespace")
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\nfrom shared.rundir import RunDir"
    found = subprocess.run(
        [*isolated, _READ_ONLY, "bash", sys.executable, "-c", f"{code}\nRunDir.create()"],
        cwd="/proc",
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=False,
    ).stderr
    assert "RunDirError: no private directory for sockets: /tmp: Read-only file system\n" in found


def test_old_files_are_touched_so_that_no_cleaner_removes_them(socket_dir: Path) -> None:
    now = time.time()
    lock = try_lock(socket_dir / "lock")
    assert lock is not None
    run_dir = RunDir(socket_dir, lock, clock=lambda: now)
    (socket_dir / "engines.files").mkdir()
    files = [socket_dir / "engines", socket_dir / "engines.files" / "config.json"]
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(files[0]))
        files[1].touch()
        watched = [socket_dir, socket_dir / "lock", *files]
        for path in reversed(watched):
            os.utime(path, (1000, 1000))
        run_dir.keep_fresh()
        assert all(path.stat().st_mtime == 1000 for path in watched)
        now += FRESH_S
        run_dir.keep_fresh()
        for path in watched:
            assert min(path.stat().st_mtime, path.stat().st_atime) > 1000
    run_dir.remove()


def test_a_parent_without_space_for_a_lock_is_skipped(
    socket_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full, empty = socket_dir / "full", socket_dir / "empty"
    for each in (full, empty):
        each.mkdir()
    open_file = os.open

    def no_space(path: Path, flags: int, *args: int, **named: int) -> int:
        if flags & os.O_CREAT and Path(path).is_relative_to(full):
            raise OSError(errno.ENOSPC, "No space left on device")
        return open_file(path, flags, *args, **named)

    monkeypatch.setattr(os, "open", no_space)
    with pytest.raises(RunDirError, match=r"sockets: .*full/.*: No space left on device"):
        RunDir.create(full)
    monkeypatch.setattr(rundir, "_bases", lambda: [full, empty])
    with RunDir.create() as run_dir:
        assert run_dir.path.parent == empty
    assert not list(full.iterdir())
