"""Ranks on other machines: an ``ssh`` of our own that starts them on another address of this one,
and notes what it was told."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import msgspec
import pytest

from engine.parallel.health import GroupWatch
from engine.parallel.progress import StepProgress
from engine.plan import FEWEST_PAGE_TOKENS
from services.processes.rank_keeper import difference
from services.ranks.connection import connection_environment, connection_files
from services.ranks.group import SOCKETS_VARIABLE
from services.ranks.keepers import RankJob, model_digest, start_over_ssh, versions
from shared.network.hostfile import HostfileError, RankHost, rdma_matrix, read_hostfile
from shared.settings import Settings
from tests.e2e.operation.test_faults import PATIENCE_S
from tests.e2e.ranks.test_ranks import LONG, at_length
from tests.e2e.ranks.test_two_machines import in_namespaces
from tests.e2e.server import Server, cached_tokens, descendants, is_running, serving, text_of
from tests.oracle import Oracle

HOSTS = [
    {"ssh": "mac1", "ips": ["127.0.0.1"], "rdma": [None, "rdma_en2"]},
    {"ssh": "mac2", "ips": ["127.0.0.2"], "rdma": ["rdma_en3", None]},
]
FAKE_SSH = """#!/bin/sh
echo "$@" >> {log}
for last; do :; done
exec sh -c "$last"
"""


@pytest.fixture
def hostfile(tmp_path: Path) -> Path:
    path = tmp_path / "hosts.json"
    path.write_text(json.dumps({"hosts": HOSTS}))
    return path


def make_ssh(folder: Path, script: str) -> Path:
    """Write an ``ssh`` of our own, in a directory for PATH."""
    program = folder / "bin" / "ssh"
    program.parent.mkdir()
    program.write_text(script)
    program.chmod(0o755)
    return program


@pytest.fixture
def ssh(tmp_path: Path) -> Path:
    """Return the file in which each call of ``ssh`` is a line. It runs here what is for there."""
    log = tmp_path / "ssh.log"
    make_ssh(tmp_path, FAKE_SSH.format(log=log))
    return log


def path_with(ssh: Path) -> str:
    return f"{ssh.parent / 'bin'}:{os.environ['PATH']}"


def job(model: Path, **changes: Any) -> RankJob:
    fields: dict[str, Any] = {
        "model": str(model),
        "fingerprint": model_digest(str(model)),
        "versions": versions(),
        "arguments": [],
        "environment": {"MLX_RANK": "1"},
        "files": {},
    }
    return RankJob(**fields | changes)


@at_length
def test_ranks_of_a_hostfile_serve_and_leave_nothing_behind(
    hostfile: Path, ssh: Path, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    model = tiny_model("llama")
    oracle, prompt = Oracle(model), 4 * LONG
    flags = ["--distributed-mode", "ring", "--distributed-hostfile", str(hostfile)]
    flags += ("--ssd-cache-dir", str(tmp_path / "ssd"), "--ssd-policy", "write_through")
    with serving(model, *flags, PATH=path_with(ssh)) as server:
        text = server.text(prompt, 30)
        oracle.check(oracle.tokenizer.encode(prompt), 30, text)
        (call,) = ssh.read_text().splitlines()
        assert "BatchMode=yes" in call and " mac2 exec " in call and "rank_keeper" in call
        for name in ("rank_keeper", "engine"):
            lose(server, name)
    far = tmp_path / "ssd-engine-0-rank-1"
    own, theirs = (
        sorted(path.name for path in each.rglob("*.safetensors")) for each in (far.parent, far)
    )
    assert theirs and own == sorted(2 * theirs), "each rank's own kvstore has all blocks"
    with serving(model, *flags, PATH=path_with(ssh)) as server:
        answer = server.complete(prompt, 30)
        assert answer["choices"][0]["text"] == text
        whole_pages = (
            (answer["usage"]["prompt_tokens"] - 1) // FEWEST_PAGE_TOKENS * FEWEST_PAGE_TOKENS
        )
        assert cached_tokens(answer) >= whole_pages > 0


@at_length
def test_a_cable_that_delays_every_packet_changes_no_text() -> None:
    device = "ip tuntap add dev one mode tun"
    printed = in_namespaces(device, "tests.e2e.ranks.far_ranks", "0", "5")
    _, far_ms = (float(line.split()[4]) for line in printed.splitlines())
    assert far_ms > 0.9 * 5 * 5, "two layers of two sums, and that of the token, wait for the cable"


def lose(server: Server, name: str) -> None:
    """Kill a process while it answers; the text goes on, and no process is left."""
    fields = {"temperature": 1.0, "seed": 5}
    expected = text_of(list(server.stream("abc", 150, **fields)))
    others = server.pids("services.processes.rank ")
    running = server.stream("abc", 150, **fields)
    begun = [next(running) for _ in range(3)]
    lost = server.kill(name)
    server.wait_until(lambda: not any(map(is_running, [lost, *others])), PATIENCE_S, "the end")
    assert text_of([*begun, *running]) == expected


def test_a_machine_with_another_version_or_other_weights_is_refused(
    tiny_model: Callable[..., Path],
) -> None:
    model = tiny_model("llama")
    assert difference(job(model)) is None
    older = versions() | {"mlx": "0.1"}
    assert "rank 0 has 0.1" in (difference(job(model, versions=older)) or "")
    assert "other weights" in (difference(job(model, fingerprint="0")) or "")


def test_a_ring_has_an_address_of_each_machine(hostfile: Path) -> None:
    options = Settings(distributed_mode="ring", distributed_hostfile=hostfile)
    hosts = read_hostfile(hostfile)
    (first,), (second,) = json.loads(connection_files(options, hosts)["MLX_HOSTFILE"])
    assert first.startswith("127.0.0.1:") and second.startswith("127.0.0.2:")
    assert connection_environment(options, hosts, 1) == {"MLX_RANK": "1"}


def test_rdma_devices_are_checked(tmp_path: Path) -> None:
    hosts = (RankHost("a", ("10.0.0.1",)), RankHost("b", ("10.0.0.2",)))
    assert rdma_matrix(hosts, "rdma_en4") == [[None, "rdma_en4"], ["rdma_en4", None]]
    with pytest.raises(HostfileError, match="is a device path; pass a file"):
        rdma_matrix(hosts, "/dev/infiniband/rdma_cm")
    with pytest.raises(HostfileError, match="from each of 2 ranks"):
        rdma_matrix(hosts, None)
    matrix = tmp_path / "matrix.json"
    matrix.write_text('[[null, null], ["rdma_en4", null]]')
    with pytest.raises(HostfileError, match="to rank 1: none is listed"):
        rdma_matrix(hosts, str(matrix))


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("[]", "names 0 hosts"),
        ('[["10.0.0.1:5"], ["10.0.0.2"]]', "is not a hostfile"),
        ('[{"ssh": "a"}, {"ssh": "b"}]', "a has no ips"),
        (
            '[{"ssh": "a", "ips": ["1"]}, {"ssh": "-oProxyCommand=x", "ips": ["1"]}]',
            "is not a machine name",
        ),
    ],
)
def test_a_bad_hostfile_is_refused(tmp_path: Path, content: str, line: str) -> None:
    path = tmp_path / "hosts.json"
    path.write_text(content)
    with pytest.raises(HostfileError, match=line):
        read_hostfile(path)


def test_a_rank_is_killed_when_the_connection_to_rank_0_is_lost(
    tiny_model: Callable[..., Path],
) -> None:
    """Even if it is stopped, and cannot notice."""
    sockets = {"plans": "ipc:///nowhere", "stores": "ipc:///nowhere"}
    described = job(
        tiny_model("llama"),
        arguments=["--model=demo", "--distributed-mode=ring", "--num-local-ranks=2"],
        environment={"MLX_RANK": "1", SOCKETS_VARIABLE: json.dumps(sockets)},
    )
    command = [sys.executable, "-m", "services.processes.rank_keeper"]
    keeper = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert keeper.stdin is not None and keeper.stdout is not None
    keeper.stdin.write(msgspec.json.encode(described) + b"\n")
    keeper.stdin.flush()
    assert json.loads(keeper.stdout.readline())["phase"] == "loading"
    ((rank, command_line),) = descendants(keeper.pid)
    assert "services.processes.rank" in command_line
    os.kill(rank, signal.SIGSTOP)
    keeper.stdin.close()
    keeper.wait(PATIENCE_S)
    assert not is_running(rank)


def test_a_machine_that_cannot_be_reached_is_named(
    hostfile: Path, ssh: Path, tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    (ssh.parent / "bin" / "ssh").write_text("#!/bin/sh\nexit 255\n")
    monkeypatch.setenv("PATH", path_with(ssh))
    found: SimpleQueue[str] = SimpleQueue()
    rank = start_over_ssh(1, job(tiny_model("llama")), read_hostfile(hostfile)[1])
    GroupWatch([rank], StepProgress(), lambda reason, code: found.put(reason)).start()
    assert found.get(timeout=PATIENCE_S).startswith("rank 1 on mac2 could not be started")
