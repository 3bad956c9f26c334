"""`services.processes.kvstore` as a process of its own."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from shared.exits import EXIT_CONFIG, EXIT_USAGE
from shared.network.socket_file import SocketFile
from shared.supervisor_link import LINK_VARIABLE
from tests.kvstore.blocks import file_of, wait_until
from tests.kvstore.process import Process
from tests.kvstore.test_server import Engine


@pytest.fixture
def kvstore(tmp_path: Path, socket_dir: Path) -> Iterator[Process]:
    """A kvstore that is not started yet, and ends with the test."""
    process = Process(tmp_path / "blocks", socket_dir / "kvstore")
    yield process
    process.end()


Begin = Callable[..., Engine]


@pytest.fixture
def begin(kvstore: Process) -> Iterator[Begin]:
    """Return a function that starts the kvstore with flags, and returns an engine of it."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def begin(*flags: str) -> Engine:
        kvstore.start(*flags)
        return Engine(context, kvstore.endpoint)

    yield begin
    context.destroy(linger=0)


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_writes_what_is_queued_and_leaves_nothing_behind(
    sent: signal.Signals, kvstore: Process, begin: Begin
) -> None:
    engine = begin()
    for number in range(100):
        assert engine.put(number, 200_000).stored
    assert kvstore.stop(sent) == 0
    assert not kvstore.socket_path.exists()
    assert not list(kvstore.directory.glob("nonce-*"))
    assert begin().has(*range(100)) == 100


def test_kill_9_under_load_leaves_only_whole_blocks(kvstore: Process, begin: Begin) -> None:
    for first in (0, 1000):
        engine = begin()
        for number in range(first, first + 60):
            engine.put(number, 300_000)
        kvstore.kill()
    engine = begin()
    wait_until(lambda: not engine.stats().indexing)
    wait_until(lambda: list((kvstore.directory / "tmp").iterdir()) == [])
    paths = list(kvstore.directory.glob("*/rank_0/*/*.safetensors"))
    assert paths
    for path in paths:
        assert path.read_bytes() == file_of(int(path.stem, 16), 300_000)
    assert engine.stats().blocks == len(paths)


def test_a_kvstore_that_cannot_start_says_why_in_one_line(
    kvstore: Process, socket_dir: Path, tmp_path: Path
) -> None:
    kvstore.start()
    (tmp_path / "file").write_text("not a directory")
    other = socket_dir / "other"
    starting = SocketFile(f"ipc://{socket_dir}/starting")
    alone = Process(tmp_path / "sub", other)
    alone.command = alone.command[:-2]  # without its socket
    for started, code, why in (
        (Process(kvstore.directory, other), EXIT_CONFIG, "another kvstore uses"),
        (Process(tmp_path / "sub", kvstore.socket_path), EXIT_CONFIG, "another process uses it"),
        (Process(tmp_path / "sub", socket_dir / "starting"), EXIT_CONFIG, "another process uses"),
        (Process(tmp_path / "sub", tmp_path / "file"), EXIT_CONFIG, "is not a socket"),
        (Process(tmp_path / "file", other), EXIT_CONFIG, "--ssd-cache-dir"),
        (alone, EXIT_USAGE, "--kvstore-socket"),
    ):
        refused = started.run()
        assert (refused.returncode, refused.stderr.count("\n")) == (code, 1), why
        assert why in refused.stderr
    assert (tmp_path / "file").read_text() == "not a directory"
    starting.remove()
    assert kvstore.stop() == 0


def test_the_kvstore_heartbeats_and_ends_with_its_supervisor(kvstore: Process) -> None:
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            kvstore.run_with(
                env={**os.environ, LINK_VARIABLE: str(theirs.fileno())}, pass_fds=[theirs.fileno()]
            )
        ours.settimeout(60)
        with ours.makefile() as lines:
            heartbeats = [json.loads(lines.readline()) for _ in range(4)]
        assert all(heartbeat["phase"] == "ready" for heartbeat in heartbeats)
    assert kvstore.wait() == 0
    assert not kvstore.socket_path.exists()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """The disk of the test's files, 2 MiB."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(tmp_path)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a small disk can be mounted only by root")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


@pytest.mark.parametrize("durability", ["best_effort", "persistent"])
def test_the_tier_shrinks_on_a_full_disk_and_grows_again(
    small_disk: Path, kvstore: Process, begin: Begin, durability: str
) -> None:
    engine = begin("--ssd-durability", durability)
    filler = small_disk / "filler"
    filler.write_bytes(bytes(1_100_000))
    for number in range(12):
        engine.put(number, 300_000)
    wait_until(lambda: engine.stats().writes_total == 12)
    stats = engine.stats()
    assert stats.drops_total == 0 and stats.evicted_total == 12 - stats.blocks >= 9
    assert engine.has(11) == 1  # the newest ones stay
    with filler.open("ab") as more:  # now there is no room for any block
        more.write(bytes(small_disk_free(small_disk)))
        wait_until(lambda: engine.put(20, 1_200_000).stored is False)
    wait_until(lambda: engine.stats().state == "full")
    assert list((kvstore.directory / "tmp").iterdir()) == []
    filler.unlink()
    wait_until(lambda: engine.stats().state == "ok", 60)
    wait_until(lambda: engine.put(30).stored and engine.has(30) == 1)
    assert kvstore.stop() == 0


def test_the_tier_leaves_the_reserve_to_others(
    small_disk: Path, kvstore: Process, begin: Begin
) -> None:
    engine = begin("--disk-reserve-gb", "0.001")
    for number in range(12):
        engine.put(number, 100_000)
    wait_until(lambda: engine.stats().writes_total == 12)
    assert small_disk_free(small_disk) >= 1_000_000
    before = engine.stats().blocks
    (small_disk / "others").write_bytes(bytes(500_000))
    wait_until(lambda: engine.stats().blocks <= before - 4)  # it gives way without any put
    assert small_disk_free(small_disk) >= 1_000_000
    assert engine.has(11) == 1
    assert kvstore.stop() == 0


def small_disk_free(path: Path) -> int:
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


def test_the_size_limit_holds_under_load(kvstore: Process, begin: Begin) -> None:
    engine = begin("--ssd-max-size-gb", "0.001")
    for number in range(100):
        engine.put(number, 50_000)
    wait_until(lambda: engine.stats().writes_total == 100)
    wait_until(lambda: engine.stats().bytes <= 1_000_000)
    stats = engine.stats()
    assert stats.limit_bytes == 1_000_000
    assert stats.blocks >= 15 and stats.evicted_total == 100 - stats.blocks
    files = list(kvstore.directory.glob("*/rank_0/*/*.safetensors"))
    assert sum(path.stat().st_size for path in files) == stats.bytes
    assert engine.has(99) == 1 and engine.has(0) == 0
    assert kvstore.stop() == 0
