"""Ollama's API of a whole server: models are loaded, unloaded, pulled and deleted through it."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.server import Server, serving
from tests.stand_ins.hub import Hub

PATIENCE_S = 60.0
MODEL = "me/tiny"


@pytest.fixture(scope="module")
def hub(tiny_model: Callable[..., Path]) -> Iterator[Hub]:
    hub = Hub(tiny_model("llama"))
    yield hub
    hub.is_open.set()
    hub.shutdown()
    hub.server_close()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hub")


@pytest.fixture(scope="module")
def server(tiny_model: Callable[..., Path], hub: Hub, home: Path) -> Iterator[Server]:
    flags = ("--served-model-name", "own", "--ollama-manage", "--num-blocks", "64")
    with serving(
        tiny_model("llama", 1),
        *flags,
        HF_ENDPOINT=hub.url,
        HF_HOME=str(home),
        HF_HUB_OFFLINE="0",
    ) as server:
        yield server


def running(server: Server) -> dict[str, Any]:
    models = server.client.get("/api/ps").json()["models"]
    return {model["name"]: model for model in models}


def generate(server: Server, model: str, **fields: Any) -> dict[str, Any]:
    body = {"prompt": "abc", "stream": False, "raw": True, "options": {"num_predict": 4}, **fields}
    return server.answer("/api/generate", model=model, **body)


def pull(server: Server, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in server.post("/api/pull", model=name).text.splitlines()]


def test_a_model_is_unloaded_and_loaded_by_keep_alive(server: Server) -> None:
    assert running(server)["own:latest"]["expires_at"].startswith("9999")
    assert server.post("/api/generate", model="own", keep_alive=0).json()["done_reason"] == "unload"
    server.wait_until(lambda: not running(server), PATIENCE_S, "unloaded")
    answer = generate(server, "own", keep_alive="1h")
    assert answer["load_duration"] > 10**8, "it waited until the model was loaded"
    server.wait_until(
        lambda: not running(server)["own:latest"]["expires_at"].startswith("9999"), 10, "an hour"
    )
    # Idle for longer than it is to be kept from now on: the time counts from the request.
    time.sleep(2.5)
    began = time.monotonic()
    server.post("/api/chat", model="own", keep_alive=2)
    server.wait_until(lambda: not running(server), PATIENCE_S, "unloaded after 2 s")
    assert time.monotonic() - began > 1.9
    generate(server, "own", keep_alive=-1)
    generate(server, "own")
    assert running(server)["own:latest"]["expires_at"].startswith("9999")


def test_a_model_is_unloaded_after_an_answer_that_is_not_to_keep_it(server: Server) -> None:
    generate(server, "own", keep_alive=0)
    server.wait_until(lambda: not running(server), PATIENCE_S, "unloaded")
    generate(server, "own")


def test_what_cannot_be_pulled_says_why(server: Server) -> None:
    *_, last = pull(server, "me/none")
    assert "me/none" in last["error"]
    whole = server.post("/api/pull", model="me/none", stream=False)
    assert whole.status_code == 500 and "me/none" in whole.json()["error"]
    for name in ("llama3.2:3b", "/etc", "a/b/c", "../x", "x" * 300, "engine/model"):
        for stream in (True, False):
            refused = server.post("/api/pull", model=name, stream=stream)
            assert refused.status_code == 400, refused.text
            assert set(refused.json()) == {"error"} and name in refused.json()["error"]
    assert {"status": "success"} in pull(server, "own"), "it is there already"


@contextmanager
def stuck_download(server: Server, hub: Hub) -> Iterator[Iterator[str]]:
    """Begin a download that cannot go on, yield the lines of its answer, and leave."""
    hub.is_open.clear()
    body = {"model": MODEL}
    with httpx.stream("POST", f"{server.url}/api/pull", json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        assert json.loads(next(lines)) == {"status": "pulling manifest"}
        server.wait_until(lambda: bool(server.pids("model_job")), PATIENCE_S, "a download")
        yield lines


def test_a_model_is_pulled_used_and_deleted(server: Server, hub: Hub, home: Path) -> None:
    with stuck_download(server, hub):
        pass
    server.wait_until(lambda: not server.pids("model_job"), PATIENCE_S, "it was cancelled")
    with stuck_download(server, hub):
        pass
    hub.is_open.set()
    assert pull(server, f"{MODEL}:latest")[-1] == {"status": "success"}

    def names() -> set[str]:
        return {model["name"] for model in server.client.get("/api/tags").json()["models"]}

    server.wait_until(lambda: names() == {"own:latest", f"{MODEL}:latest"}, 10, "it is listed")
    engines = server.pids("services.processes.engine")
    assert (
        generate(server, "own")["response"] and server.pids("services.processes.engine") == engines
    )
    assert generate(server, MODEL)["response"] == generate(server, f"{MODEL}:latest")["response"]
    assert pull(server, f"hf.co/{MODEL}")[-1] == {"status": "success"}
    assert generate(server, MODEL)["response"] == generate(server, f"hf.co/{MODEL}")["response"]
    assert generate(server, "own")["response"], "the other is served beside it"
    server.process.send_signal(signal.SIGHUP)  # reading the file again takes nothing out
    time.sleep(1)
    assert names() == {"own:latest", f"{MODEL}:latest"}
    assert list(home.rglob("model.safetensors"))
    refused = server.client.request("DELETE", "/api/delete", json={"model": "own"})
    assert refused.status_code == 400 and "is a configured model" in refused.json()["error"]
    done = server.client.request("DELETE", "/api/delete", json={"model": MODEL})
    assert done.status_code == 200, done.text
    assert not list(home.rglob("model.safetensors"))
    server.wait_until(lambda: names() == {"own:latest"}, PATIENCE_S, "it is gone")
    again = server.client.request("DELETE", "/api/delete", json={"model": MODEL})
    assert again.status_code == 404
    assert generate(server, "own")["response"]


def test_a_download_that_is_killed_is_an_error(server: Server, hub: Hub, home: Path) -> None:
    with stuck_download(server, hub) as lines:
        (pid,) = server.pids("model_job")
        os.kill(pid, signal.SIGKILL)
        *_, last = lines
    hub.is_open.set()
    assert "pull model: " in json.loads(last)["error"]
