"""`--cluster ray`: engines on a real Ray cluster of three nodes, which are all this machine."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import unused_port
from tests.e2e.process import ROOT
from tests.e2e.server import (
    RESUMED,
    Server,
    cached_tokens,
    descendants,
    is_running,
    serving,
    text_of,
    wait_ended,
)

pytest.importorskip("ray", reason="ray is not installed (the extra ray)")
from ray.cluster_utils import Cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

PATIENCE_S = 120.0
NODE_BYTES = 900_000_000  # room for one engine of 0.5 GB
LONG = 500
ENGINE = "services.processes.engine"


class RayNodes:
    """A cluster, and which engines run on which of its nodes."""

    def __init__(self) -> None:
        self.cluster = Cluster(initialize_head=True, head_node_args=self._arguments({}))

    @staticmethod
    def _arguments(labels: Mapping[str, str]) -> dict[str, Any]:
        return {
            "num_cpus": 1,
            "memory": NODE_BYTES,
            "include_dashboard": False,
            "labels": dict(labels),
        }

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def add(self, **labels: str) -> Any:
        return self.cluster.add_node(**self._arguments(labels))

    def nodes(self) -> list[Any]:
        found: list[Any] = self.cluster.list_all_nodes()
        return found

    def lose(self, node: Any) -> None:
        """Kill a node with all that runs on it."""
        self.cluster.remove_node(node, allow_graceful=False)

    def engines(self, node: Any, word: str = ENGINE) -> list[int]:
        """Return the engine processes on ``node``."""
        (raylet,) = node.all_processes["raylet"]
        return [pid for pid, command in descendants(raylet.process.pid) if word in command]

    def all_engines(self, word: str = ENGINE) -> list[int]:
        return [pid for node in self.nodes() for pid in self.engines(node, word)]


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    found = RayNodes()
    try:
        for _ in range(2):
            found.add(kind="worker")
        yield found
    finally:
        found.cluster.shutdown()


@contextmanager
def serving_on(nodes: RayNodes, *flags: str, model: Path | None = None) -> Iterator[Server]:
    address = f"tcp://127.0.0.1:{unused_port()}"
    cluster = ("--cluster", "ray", "--ray-address", nodes.address, "--engine-socket", address)
    with serving(model, *cluster, *flags) as server:
        yield server
    wait_ended(nodes.all_engines(), PATIENCE_S)


def wait_ready(server: Server, number: int) -> float:
    """Wait for a number of ready engines; return the seconds that it took."""
    began = time.monotonic()
    server.wait_until(lambda: len(server.ready_engines()) == number, PATIENCE_S)
    return time.monotonic() - began


@contextmanager
def streams(server: Server, number: int) -> Iterator[Sequence[Future[str]]]:
    """Ask for long texts; yield them as they will be."""

    def text(question: int) -> str:
        return text_of(list(server.stream(f"number {question}", LONG)))

    with ThreadPoolExecutor(number) as pool:
        yield [pool.submit(text, question) for question in range(number)]


def test_engines_are_placed_on_all_nodes_and_again_when_one_is_lost(
    nodes: RayNodes, tiny_model: Callable[..., Path]
) -> None:
    began = time.monotonic()
    flags = ("--engines", "3", "--memory-gb", "0.5")
    with serving_on(nodes, *flags, model=tiny_model("llama")) as server:
        wait_ready(server, 3)
        print(f"\nthree engines placed and ready in {time.monotonic() - began:.1f} s")  # noqa: T201
        assert [len(nodes.engines(node)) for node in nodes.nodes()] == [1, 1, 1]
        assert all(name.startswith("ray.engine-") for name in server.ready_engines())
        with streams(server, 6) as alone:
            expected = [future.result() for future in alone]
        lost = nodes.nodes()[-1]
        resumed = server.metric(RESUMED)
        with streams(server, 6) as texts:
            server.wait_until(lambda: server.sequences_in_flight() == 6, PATIENCE_S, "six run")
            nodes.lose(lost)
            assert [future.result() for future in texts] == expected
        assert server.metric(RESUMED) > resumed
        wait_ready(server, 2)
        began = time.monotonic()
        new = nodes.add(kind="worker")
        wait_ready(server, 3)
        print(f"placed again in {time.monotonic() - began:.1f} s")  # noqa: T201
        assert len(nodes.engines(new)) == 1

        # An engine that dies is started again by Ray, and dies with its actor.
        (engine,) = nodes.engines(new)
        os.kill(engine, signal.SIGKILL)
        server.wait_until(lambda: nodes.engines(new) not in ([], [engine]), PATIENCE_S, "another")
        wait_ready(server, 3)
        (engine,), (actor,) = nodes.engines(new), nodes.engines(new, "EngineHost")
        os.kill(actor, signal.SIGKILL)
        server.wait_until(lambda: not is_running(engine), PATIENCE_S, "its engine ends")
        wait_ready(server, 3)


CONFIG = """
[[model]]
id = "scaled"
path = "{scaled}"
memory-gb = 0.5
engines = 1
max-engines = 2
scale-down-s = 1
max-batch-size = 1
prefill-batch-size = 1
completion-batch-size = 1

[[model]]
id = "divided"
path = "{divided}"
memory-gb = 0.6
ray-label = ["kind=worker"]
distributed-mode = "ring"
num-local-ranks = 2
"""


def test_two_models_one_of_two_ranks_and_engines_by_the_queue(
    nodes: RayNodes, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    file = tmp_path / "models.toml"
    models = {"scaled": tiny_model("llama"), "divided": tiny_model("llama", 1)}
    file.write_text(CONFIG.format(**models))
    with serving_on(nodes, "--config", str(file)) as server:
        wait_ready(server, 2)
        assert nodes.all_engines("services.processes.rank ")
        head = nodes.nodes()[0]
        assert not nodes.engines(head, "services.processes.rank "), (
            "its label says where it may run"
        )
        assert server.complete("a", model="divided")["usage"]["completion_tokens"] == 16
        with ThreadPoolExecutor(8) as pool:
            began = time.monotonic()
            stop = began + PATIENCE_S

            def ask() -> None:
                while len(server.ready_engines()) < 3 and time.monotonic() < stop:
                    server.complete("a", 200, model="scaled", ignore_eos=True)

            for future in [pool.submit(ask) for _ in range(8)]:
                future.result()
        assert len(server.ready_engines()) == 3
        print(f"\nanother engine for a queue in {time.monotonic() - began:.1f} s")  # noqa: T201
        wait_ready(server, 2)
        assert any("idle capacity: scaling from" in line for line in server.log)
        assert server.complete("a", model="scaled")["usage"]["completion_tokens"] == 16


def test_blocks_of_engines_elsewhere_are_kept_by_the_kvstore_of_this_machine(
    nodes: RayNodes, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    kvstore = f"tcp://127.0.0.1:{unused_port()}"
    flags = ("--kvstore-socket", kvstore, "--ssd-cache-dir", str(tmp_path), "--memory-gb", "0.5")
    policy = ("--ssd-policy", "write_through")
    prompt = "a long prompt, " * 20
    with serving_on(nodes, *flags, *policy, model=tiny_model("llama")) as server:
        wait_ready(server, 1)
        first = server.complete(prompt)
        server.wait_metric("mlx_lm_server_store_blocks")
        (engine,) = nodes.all_engines()
        os.kill(engine, signal.SIGKILL)  # with what it has in RAM
        server.wait_until(lambda: not is_running(engine), PATIENCE_S, "its end")
        wait_ready(server, 0)
        wait_ready(server, 1)
        again = server.complete(prompt)
        assert again["choices"] == first["choices"]
        assert cached_tokens(again) > 0


def guide() -> list[list[str]]:
    """Return the commands of docs/deploy/ray.md that start nodes: the head, then another."""
    page = (ROOT / "docs" / "deploy" / "ray.md").read_text(encoding="utf-8")
    return [line.split() for line in re.findall(r"^    (ray start .*)$", page, re.MULTILINE)]


def test_the_commands_of_the_guide_make_a_cluster(tiny_model: Callable[..., Path]) -> None:
    port = str(unused_port())
    started = []
    with ExitStack() as stack:
        for words in guide():
            command = [word.replace("HEAD", "127.0.0.1").replace("6379", port) for word in words]
            command[0] = str(Path(sys.executable).with_name("ray"))
            node = subprocess.Popen([*command, "--block"], stdout=subprocess.DEVNULL)
            stack.callback(node.wait, PATIENCE_S)
            stack.callback(node.terminate)
            started.append(node)
        cluster = ("--cluster", "ray", "--ray-address", f"127.0.0.1:{port}")
        with serving(tiny_model("llama"), *cluster, "--ray-label", "kind=mac") as server:
            wait_ready(server, 1)
            assert server.complete("a")["usage"]["completion_tokens"] == 16
            (engine,) = [pid for pid, words in descendants(started[1].pid) if ENGINE in words]
            assert is_running(engine)
