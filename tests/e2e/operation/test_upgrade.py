"""Processes of two releases: a rolling upgrade, and releases that do not understand each other."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from shared.version import installed_version
from tests.e2e.process import Process, running_process, wait_until

OTHER_RELEASE = "tests.e2e.operation.other_release"
PATIENCE_S = 60.0


class Site:
    """A router, a kvstore and engines, each of the release that a test wants."""

    def __init__(self, stack: ExitStack, model: Path, directory: Path) -> None:
        self._stack = stack
        self._flags = (
            *(f"--model={model}", f"--engine-socket=ipc://{directory}/engines", "--kv-bits=16"),
            *(f"--kvstore-socket=ipc://{directory}/blocks", f"--ssd-cache-dir={directory}/ssd"),
            *("--host=127.0.0.1", "--port=0", "--restart-wait-s=0.5"),
        )

    def start(self, process: str, versions: str, **environment: str) -> Process:
        module = f"services.processes.{process}"
        return self._stack.enter_context(
            running_process(OTHER_RELEASE, versions, module, *self._flags, **environment)
        )

    def engine(self, name: str, versions: str) -> Process:
        return self.start("engine", versions, _MLX_LM_SERVER_ENGINE=name)

    def connect(self, router: Process) -> httpx.Client:
        url = router.wait_for(r"listening on (https?://\S+)")[1]
        return self._stack.enter_context(httpx.Client(base_url=url, timeout=PATIENCE_S))


@pytest.fixture
def site(tiny_model: Callable[..., Path], socket_dir: Path) -> Any:
    with ExitStack() as stack:
        yield Site(stack, tiny_model("llama"), socket_dir)


def complete(client: httpx.Client) -> httpx.Response:
    body = {"prompt": "abc", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    return client.post("/v1/completions", json=body)


def test_a_newer_router_and_kvstore_serve_engines_of_the_previous_protocol(site: Site) -> None:
    router, _ = site.start("router", "2,1"), site.start("kvstore", "2,1")
    old = site.engine("old", "1")
    client = site.connect(router)
    wait_until(lambda: client.get("/readyz").status_code == 200, router, old)
    assert complete(client).status_code == 200
    old.wait_for(
        rf"the router at \S+ uses protocol 2, and this process \(mlx-lm-server "
        rf"{re.escape(installed_version())}\) 1: upgrade this process"
    )
    time.sleep(1.5)  # the router greets it again and again
    assert sum("uses protocol 2" in line for line in old.log) == 1
    old.wait_for("connected to the kvstore")


def test_an_engine_of_an_unknown_protocol_is_refused_with_both_versions_until_it_is_upgraded(
    site: Site,
) -> None:
    router, kvstore = site.start("router", "2"), site.start("kvstore", "2")
    old = site.engine("old", "1")
    client = site.connect(router)
    release = re.escape(installed_version())
    why = (
        rf"it \(mlx-lm-server {release}\) uses protocol 1, and this process \(mlx-lm-server "
        rf"{release}\) 2: upgrade the other process"
    )
    router.wait_for(rf"engine old was refused: {why}")
    kvstore.wait_for("the engine uses protocol 1, and this process .* 2: upgrade the other process")
    answer = complete(client)
    assert answer.status_code == 503
    assert re.search(f"engine old: {why}", answer.json()["error"]["message"])
    assert 'engines_refused_total{reason="version"} 1' in client.get("/metrics").text
    new = site.engine("new", "2")
    wait_until(lambda: client.get("/readyz").status_code == 200, router, old, new)
    assert complete(client).status_code == 200
