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
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import unused_port
from tests.e2e.process import Process, running_process

docker = pytest.importorskip("docker", reason="the package docker is not installed")
from tests.deploy.compose_stack import (  # noqa: E402
    BUILD_S,
    RECOVER_S,
    START_S,
    Stack,
    eventually,
    load,
)

SERVICES = ("router", "engine", "kvstore")
NATIVE = "router-for-native-engines"


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
    request = {
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
        "stream": True,
    }
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


def test_native_engines_join_a_router_in_a_container(
    images: dict[str, Any], tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "deploy" / "compose.md").read_text()
    init, engine = re.findall(r"^    mlx-lm-server (.+)$", page, re.MULTILINE)
    port, keys = unused_port(), tmp_path / "keys"

    def words(command: str, directory: Path) -> list[str]:
        values = {"MODEL": str(tiny_model("llama")), "keys": str(directory), "5555": str(port)}
        return re.sub("MODEL|5555|keys$", lambda found: values[found[0]], command).split()

    # Those of the page, and of a stranger who has made keys in the same way.
    other = tmp_path / "other"
    for directory in (keys, other):
        command = [sys.executable, "-m", "mlx_lm_server", *words(init, directory)]
        subprocess.run(command, check=True, capture_output=True)
    (other / "server.key").write_text((keys / "server.key").read_text())
    if os.getuid() == 0:  # the container runs as a user all the same, whose the keys have to be
        for path in (keys, *keys.iterdir()):
            os.chown(path, 10001, 10001)
    variables = {"KEYS": str(keys), "KEYS_USER": str(keys.stat().st_uid)}
    stack = Stack(
        f"mlms-native-{os.getpid()}",
        unused_port(),
        *("--profile", "mac"),
        **variables,
        ENGINE_PORT=str(port),
        MODEL="native",
    )
    tmp_path.chmod(0o755)
    with ExitStack() as running:
        running.callback(stack.close)
        stack.compose("up", "--detach", NATIVE)

        def join(directory: Path) -> Process:
            flags = [*words(engine, directory), "--served-model-name=native", "--kv-bits=16"]
            flags += [f"--ssd-cache-dir={directory}/blocks"]
            return running.enter_context(running_process("mlx_lm_server", *flags))

        (container,) = stack.containers(NATIVE)
        join(other)
        assert eventually(lambda: b"a connection was refused: the key" in container.logs())
        assert stack.ready_engines() == []
        join(keys)
        assert eventually(lambda: len(stack.ready_engines()) == 1), stack.logs()
        (name,) = stack.ready_engines()
        assert name.startswith("native.")
        answer = stack.client.post("/v1/completions", json={"prompt": "a", "max_tokens": 4})
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 4
        assert container.exec_run(["id", "-u"]).output != b"0\n"
