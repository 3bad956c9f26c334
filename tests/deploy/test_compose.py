"""The containers of docker-compose.yml, built and started.

Run by `make compose-test` only: they need a Docker daemon, a package index and some minutes.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import unused_port
from tests.e2e.process import Process, running_process
from tests.e2e.server import descendants

docker = pytest.importorskip("docker", reason="the package docker is not installed")
from tests.deploy.compose_stack import (  # noqa: E402
    BUILD_S,
    CAPITAL,
    RECOVER_S,
    ROOT,
    START_S,
    Stack,
    eventually,
    load,
)

SERVICES = ("router", "engine", "kvstore")
NATIVE = "router-for-native-engines"
DEBIAN = ROOT / "tests" / "deploy" / "compose.debian.yml"


def _why_not() -> str:
    """Return why these tests cannot run here; empty if they can."""
    if "COMPOSE_TEST" not in os.environ:
        return "only with COMPOSE_TEST=1 (make compose-test)"
    try:
        daemon = docker.from_env()
        daemon.ping()
        daemon.close()
    except docker.errors.DockerException as error:
        return f"there is no Docker daemon: {error}"
    return "" if shutil.which("docker") else "the command docker is not installed"


pytestmark = [
    pytest.mark.skipif(bool(reason := _why_not()), reason=reason),
    pytest.mark.timeout(BUILD_S + START_S + 3 * RECOVER_S),
]


@pytest.fixture(scope="module")
def images() -> Iterator[dict[str, Any]]:
    """Build the images; yield them by the names of their services."""
    stack = Stack(f"mlms-build-{os.getpid()}", 0)
    stack.compose("build", timeout=BUILD_S)
    yield {name: stack.daemon.images.get(f"mlx-lm-server-{name}") for name in SERVICES}
    stack.daemon.close()


@pytest.fixture(scope="module")
def stack(images: dict[str, Any]) -> Iterator[Stack]:
    stack = Stack(f"mlms-test-{os.getpid()}", unused_port())
    try:
        print(f"\ncold start to healthy: {stack.up():.1f} s")  # noqa: T201
        yield stack
    finally:
        stack.close()


def test_images_are_small_and_run_as_a_user_of_their_own(images: dict[str, Any]) -> None:
    base = images["router"].client.images.get("python:3.13-slim-trixie").attrs["Size"]
    for name, image in images.items():
        size = image.attrs["Size"]
        print(f"\n{name}: {size / 1e6:.0f} MB, {(size - base) / 1e6:.0f} above its base")  # noqa: T201
        assert image.attrs["Config"]["User"] == "server"
    code = (
        "import importlib.util as util, redis, limits; assert util.find_spec('mlx_lm');"
        "assert not util.find_spec('mlx') and not util.find_spec('onnxruntime')"
    )
    for name in ("router", "kvstore"):
        images[name].client.containers.run(
            images[name].id, ["-c", code], entrypoint="python", remove=True, read_only=True
        )
        assert images[name].attrs["Size"] < images["engine"].attrs["Size"] / 2


def test_the_three_containers_are_healthy_and_answer(stack: Stack) -> None:
    for service in SERVICES:
        (container,) = stack.containers(service)
        assert container.attrs["State"]["Health"]["Status"] == "healthy"
        assert container.attrs["HostConfig"]["ReadonlyRootfs"]
        assert container.exec_run(["id", "-u"]).output == b"10001\n"
        assert container.exec_run(["touch", "/app/file"]).exit_code != 0
    assert "Paris" in stack.capital()


def test_an_answer_streams(stack: Stack) -> None:
    request = {**CAPITAL, "stream": True}
    with stack.client.stream("POST", "/v1/chat/completions", json=request) as answer:
        lines = [line for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    assert "Paris" in "".join(lines)


@pytest.mark.parametrize("service", ["engine", "kvstore", "router"])
def test_a_killed_container_is_restarted_and_serves(stack: Stack, service: str) -> None:
    started = stack.started_at(service)
    stack.kill(service)
    assert eventually(lambda: stack.started_at(service) != started)
    assert eventually(lambda: bool(stack.ready_engines())), stack.logs()
    assert "Paris" in stack.capital()


def test_three_engines_join_and_restart_one_by_one_without_a_failed_request(stack: Stack) -> None:
    stack.up("--scale", "engine=3")
    assert eventually(lambda: len(stack.ready_engines()) == 3), stack.logs()
    first = stack.started_at("engine")
    with load(stack, clients=4) as answers:
        for container in stack.containers("engine"):
            container.restart(timeout=40)
            assert eventually(lambda: len(stack.ready_engines()) == 3), stack.logs()
        assert eventually(lambda: len(answers) > 40), answers[-5:]
    assert not set(stack.started_at("engine")) & set(first)
    assert [each for each in answers if "Paris" not in each] == []
    print(f"\n{len(answers)} answers while three engines were restarted")  # noqa: T201


def test_several_models_are_served(stack: Stack) -> None:
    stack.up("--scale", "engine=1", MODELS="first=demo,second=demo")
    names = {"first", "second"}
    listed: set[str] = set()

    def are_listed() -> bool:
        listed.update(one["id"] for one in stack.client.get("/v1/models").json()["data"])
        return names <= listed and len(stack.ready_engines()) == 2

    assert eventually(are_listed), stack.logs()
    for name in names:
        assert "Paris" in stack.capital(name)


def test_what_is_taken_down_leaves_nothing(stack: Stack) -> None:
    assert len(stack.leftovers()) >= 7  # three containers, a network, three volumes
    stack.down()
    assert stack.leftovers() == []


@dataclass
class MacHost:
    """The profile for a Mac, with engines of this machine in place of the Mac's."""

    stack: Stack
    engine_port: int
    prometheus: httpx.Client
    model: Path
    directory: Path
    """It has the folders of keys, and of blocks."""

    def words(self, command: str, keys: Path) -> list[str]:
        """Return the words of a command of the guide, with our model, keys and port."""
        values = {"MODEL": str(self.model), "keys": str(keys), "5555": str(self.engine_port)}
        return re.sub("MODEL|5555|keys$", lambda found: values[found[0]], command).split()

    def measured(self, metric: str) -> float:
        """Return the sum of a metric, as Prometheus has it; 0 if it has none."""
        answer = self.prometheus.get("/query", params={"query": f"sum({metric})"})
        return sum(float(one["value"][1]) for one in answer.json()["data"]["result"])


def guide() -> list[str]:
    """Return our commands of the guide: one makes keys, the other starts an engine."""
    page = (ROOT / "docs" / "deploy" / "compose.md").read_text()
    return re.findall(r"^    mlx-lm-server (.+)$", page, re.MULTILINE)


@pytest.fixture
def mac(
    images: dict[str, Any], tiny_model: Callable[..., Path], tmp_path: Path
) -> Iterator[MacHost]:
    """Make the keys of the guide, and those of a stranger; start the containers of the profile."""
    ports = [unused_port() for _ in range(4)]
    keys = tmp_path / "keys"
    flags, own_images = ["--profile", "mac"], True
    try:
        images["router"].client.images.pull("prom/prometheus", "v3.5.0")
    except docker.errors.APIError:  # no registry is reached
        flags += ["-f", "docker-compose.yml", "-f", str(DEBIAN)]
        own_images = False
    stack = Stack(
        f"mlms-mac-{os.getpid()}",
        ports[0],
        *flags,
        KEYS=str(keys),
        KEYS_USER=str(10001 if os.getuid() == 0 else os.getuid()),
        ENGINE_PORT=str(ports[1]),
        PROMETHEUS_PORT=str(ports[2]),
        GRAFANA_PORT=str(ports[3]),
        MODEL="native",
    )
    api = httpx.Client(base_url=f"http://127.0.0.1:{ports[2]}/api/v1", timeout=30)
    host = MacHost(stack, ports[1], api, tiny_model("llama"), tmp_path)
    for directory in (keys, tmp_path / "other"):
        command = [sys.executable, "-m", "mlx_lm_server", *host.words(guide()[0], directory)]
        subprocess.run(command, check=True, capture_output=True)
    (tmp_path / "other" / "server.key").write_text((keys / "server.key").read_text())
    if os.getuid() == 0:  # the container runs as a user all the same, whose the keys have to be
        for path in (keys, *keys.iterdir()):
            os.chown(path, 10001, 10001)
    tmp_path.chmod(0o755)
    try:
        stack.compose("up", "--detach", *([] if own_images else ["--build"]), timeout=BUILD_S)
        yield host
        stack.down()
        assert stack.leftovers() == []
    finally:
        stack.close()
        api.close()


def test_native_engines_and_their_kvstore_join_a_router_and_its_monitoring(mac: MacHost) -> None:
    stack = mac.stack
    with ExitStack() as running:

        def join(keys: Path) -> Process:
            flags = [*mac.words(guide()[1], keys), "--served-model-name=native", "--kv-bits=16"]
            flags += [f"--ssd-cache-dir={keys}/blocks", "--ssd-policy=write_through"]
            return running.enter_context(running_process("mlx_lm_server", *flags))

        (container,) = stack.containers(NATIVE)
        join(mac.directory / "other")
        assert eventually(lambda: b"a connection was refused: the key" in container.logs())
        assert stack.ready_engines() == []
        engine = join(mac.directory / "keys")
        assert eventually(lambda: len(stack.ready_engines()) == 1), stack.logs()
        (name,) = stack.ready_engines()
        assert name.startswith("native.")
        below = descendants(engine.popen.pid)
        assert any("services.processes.kvstore" in command for _, command in below)
        body = {"prompt": "a b c d " * 40, "max_tokens": 4}
        answer = stack.client.post("/v1/completions", json=body)
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 4
        assert container.exec_run(["id", "-u"]).output != b"0\n"
        # Prometheus, in its container, sees what the kvstore outside has.
        assert eventually(lambda: mac.measured("mlx_lm_server_store_blocks") > 0), stack.logs()
        assert mac.measured("up") == 1
