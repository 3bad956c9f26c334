"""A server under ``mlx.launch``, and the environment of JACCL that a fake launcher is given."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import zmq

from engine.model.errors import ModelUnavailable
from engine.parallel.errors import RankFailed
from services.ranks.connection import rank_hosts
from services.ranks.group import SOCKETS_VARIABLE, OtherRanks, check, divided
from services.ranks.keepers import RankJob, accept_launched, versions
from services.ranks.rdma import missing_devices
from services.supervision.launched import own_job
from shared import settings
from shared.network.hostfile import RankHost, read_hostfile
from tests.conftest import unused_port
from tests.e2e.operation.test_faults import PATIENCE_S
from tests.e2e.process import wait_until
from tests.e2e.ranks.test_ranks import LONG, at_length
from tests.e2e.ranks.test_remote_ranks import HOSTS, make_ssh
from tests.e2e.server import Server, is_running, private_directory, text_of
from tests.oracle import Oracle

MLX_LAUNCH = "from mlx._distributed_utils.launch import main; main()"
FAKE_SSH = """#!/bin/sh
echo "$@" > {log}
head -n 1 > {log}.job
cat > /dev/null
"""


@contextmanager
def launched(model: Path, count: int) -> Iterator[Server]:
    """Run a server of ``count`` ranks under ``mlx.launch``."""
    with private_directory() as private:
        launch = ["-c", MLX_LAUNCH, "--backend", "ring", "-n", str(count)]
        launch += ["--starting-port", str(unused_port()), "--python", sys.executable, "--"]
        serve = ["-m", "mlx_lm_server", "--model", str(model), "--host", "127.0.0.1", "--port", "0"]
        serve += ["--distributed-mode", "ring", "--kv-bits", "16", "--disk-reserve-gb", "0"]
        serve += ["--ssd-cache-dir", f"{private}/ssd", "--restart-wait-s", "120"]
        process = subprocess.Popen(
            [sys.executable, *launch, *serve],
            stdin=subprocess.PIPE,  # without one it spins
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "XDG_RUNTIME_DIR": private},
        )
        server = Server(process)
        try:
            server.wait_ready()
            yield server
            children = server.pids()
        finally:
            process.kill()
            process.wait()
        server.wait_until(lambda: not any(map(is_running, children)), PATIENCE_S, "the end")


@at_length
def test_a_server_under_mlx_launch_starts_lost_ranks_again_and_ends_with_it(
    tiny_model: Callable[..., Path],
) -> None:
    oracle = Oracle(tiny_model("llama"))
    with launched(tiny_model("llama"), 2) as server:
        text = server.text(LONG, 30)
        oracle.check(oracle.tokenizer.encode(LONG), 30, text)
        fields = {"temperature": 1.0, "seed": 5}
        expected = text_of(list(server.stream("abc", 150, **fields)))
        for name in ("services.processes.rank ", "services.processes.engine"):
            (lost,) = server.pids(name)
            running = server.stream("abc", 150, **fields)
            begun = [next(running) for _ in range(3)]
            os.kill(lost, signal.SIGKILL)
            assert text_of([*begun, *running]) == expected


def test_a_rank_takes_of_rank_0_only_what_it_cannot_know() -> None:
    """Whoever listens at its address could make it run anything otherwise."""
    hostile = RankJob(
        model="theirs",
        fingerprint="f",
        versions=versions(),
        arguments=["--trust-remote-code"],
        environment={"MLX_RANK": "0", "LD_PRELOAD": "x.so", SOCKETS_VARIABLE: "{}"},
        files={"PYTHONSTARTUP": "boo", "MLX_HOSTFILE": "[]"},
        kvstore=["--config=theirs"],
        leader=os.getppid(),
    )
    argv = ["--model=ours", "--distributed-mode=ring", "--num-local-ranks=2", "--max-batch-size=3"]
    own = own_job(hostile, settings.parse(argv, {}, "test"), 1)
    assert own.model == "ours" and own.fingerprint == "f"
    assert {"--model=ours", "--max-batch-size=3"} < set(own.arguments)
    assert own.environment == {"MLX_RANK": "1", SOCKETS_VARIABLE: "{}"}
    assert own.files == {"MLX_HOSTFILE": "[]"}
    assert own.leader is None, "it is killed when rank 0 is silent"
    assert own.kvstore is not None and "--config=theirs" not in own.kvstore


def test_rank_0_waits_for_every_rank_that_was_started() -> None:
    port = unused_port()
    hosts = [RankHost("", ("127.0.0.1",), address=f"127.0.0.1:{port + n}") for n in range(3)]
    ends: list[socket.socket] = []

    def connect() -> None:
        for greeting in (b"2\n", b"hello\n", b"2\n", b"1\n"):
            while True:
                try:
                    ends.append(socket.create_connection(("127.0.0.1", port)))
                    break
                except ConnectionRefusedError:
                    pass
            ends[-1].sendall(greeting)

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    found = accept_launched(hosts, PATIENCE_S)
    thread.join(PATIENCE_S)
    assert [kept.rank for kept in found] == [1, 2]
    found[1].link.sendall(b"job")
    assert ends[0].recv(3) == b"job"
    with pytest.raises(RankFailed, match="rank 1, rank 2 did not connect within 0 s"):
        accept_launched(hosts, 0.0)
    for each in (*ends, *(kept.link for kept in found)):
        each.close()


def test_addresses_alone_are_refused_without_mlx_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ring.json"
    path.write_text('[["10.0.0.1:5000", "10.0.1.1:5000"], ["10.0.0.2:5000"]]')
    options = settings.Settings(distributed_mode="ring", distributed_hostfile=path)
    monkeypatch.delenv("MLX_RANK", raising=False)
    with pytest.raises(ModelUnavailable, match=r"start the server under mlx\.launch"):
        rank_hosts(options)
    monkeypatch.setenv("MLX_RANK", "0")
    assert [host.address for host in rank_hosts(options)] == ["10.0.0.1:5000", "10.0.0.2:5000"]
    assert options.ranks == 2 and options.ranks_here == 1
    path = path.with_name("one-machine.json")
    path.write_text('[["127.0.0.1:5000"], ["127.0.0.1:5001"]]')
    assert settings.Settings(distributed_mode="ring", distributed_hostfile=path).ranks_here == 2


def test_a_launcher_of_jaccl_gets_all_that_mlx_needs(
    tmp_path: Path, tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    log, hosts = tmp_path / "ssh.log", tmp_path / "hosts.json"
    program = make_ssh(tmp_path, FAKE_SSH.format(log=log))
    envs = ["MLX_METAL_FAST_SYNCH=1"]  # as mlx.distributed_config writes it
    hosts.write_text(json.dumps({"backend": "jaccl", "envs": envs, "hosts": HOSTS}))
    for name in ("MLX_RANK", "MLX_IBV_DEVICES", "MLX_JACCL_COORDINATOR", "MLX_METAL_FAST_SYNCH"):
        monkeypatch.setenv(name, "")  # and as it was at the end
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    flags = ["--model", str(tiny_model("llama")), "--distributed-mode=jaccl", "--memory-gb=1.5"]
    options = settings.parse([*flags, f"--distributed-hostfile={hosts}"], {}, "test")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    ranks = OtherRanks(options, context, lambda reason, code: None)
    names = ("MLX_RANK", "MLX_JACCL_COORDINATOR", "MLX_METAL_FAST_SYNCH")
    own = {name: os.environ[name] for name in names}
    matrix = json.loads(Path(os.environ["MLX_IBV_DEVICES"]).read_text())
    sent = Path(f"{log}.job")
    wait_until(lambda: sent.exists() and sent.read_bytes().endswith(b"\n"))
    ranks.close()
    context.destroy(0)
    assert own == dict(zip(names, ("0", "127.0.0.1:32323", "1"), strict=True))
    assert matrix == [[None, "rdma_en2"], ["rdma_en3", None]]
    call = log.read_text()
    for words in ("-T -o BatchMode=yes", "mac2 exec ", "services.processes.rank_keeper"):
        assert words in call
    job = msgspec.json.decode(sent.read_bytes(), type=RankJob)
    theirs = [job.environment[name] for name in names]
    assert theirs == ["1", "127.0.0.1:32323", "1"]
    assert json.loads(job.files["MLX_IBV_DEVICES"]) == matrix
    assert {"--distributed-mode=jaccl", "--memory-gb=1.5"} < set(job.arguments)
    assert not any("hostfile" in word for word in job.arguments)
    copy = tmp_path / "copy.json"
    copy.write_text(job.files["MLX_LM_SERVER_DISTRIBUTED_HOSTFILE"])
    assert [host.ssh for host in read_hostfile(copy)] == ["mac1", "mac2"]


def test_jaccl_is_refused_where_there_is_none(
    tmp_path: Path, tiny_model: Callable[..., Path]
) -> None:
    hosts = tmp_path / "hosts.json"
    hosts.write_text(json.dumps(HOSTS))
    options = settings.Settings(distributed_mode="jaccl", distributed_hostfile=hosts)
    with pytest.raises(ModelUnavailable, match=r"this MLX has no JACCL: it requires macOS 26\.2"):
        check(options, tiny_model("llama"))
    assert missing_devices([None, "rdma_en2"], ["rdma_en2", "rdma_en4"]) is None
    assert missing_devices([None, ["rdma_en2", "rdma_en7"]], ["rdma_en2"]) == (
        "no RDMA device rdma_en7: ibv_devices lists rdma_en2"
    )
    assert missing_devices([None, "rdma_en2"], None) is None


def test_fewer_machines_of_a_hostfile_are_started_where_a_model_does_not_divide(
    tmp_path: Path, tiny_model: Callable[..., Path]
) -> None:
    hosts = tmp_path / "hosts.json"
    names = [{"ssh": f"mac{n}", "ips": [f"10.0.0.{n}"]} for n in range(3)]
    hosts.write_text(json.dumps(names))
    options = settings.Settings(
        model="m", distributed_mode="ring", distributed_hostfile=hosts, distributed_strict=False
    )
    fewer = divided(options, tiny_model("llama"))  # of 2 KV heads
    assert [host.ssh for host in rank_hosts(fewer)] == ["mac0", "mac1"]
    assert fewer.ranks == 2 and fewer.num_local_ranks is None
    assert fewer.distributed_hostfile is not None
    fewer.distributed_hostfile.unlink()
