"""Models in the hub's cache, and hubs that fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from engine.model.errors import ModelUnavailable
from engine.model.hub import download
from tests.stand_ins.hub import Hub

ONE_FILE = {"config.json": "{}", "model.safetensors": ""}
INDEX = json.dumps(
    {"weight_map": {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}}
)


@pytest.mark.parametrize(
    ("files", "is_whole"),
    [
        (ONE_FILE, True),
        ({"config.json": "{}"}, False),
        ({"model.safetensors": ""}, False),
        ({"config.json": "{}", "model-1-of-2.safetensors": ""}, False),
        (
            {
                "config.json": "{}",
                "model.safetensors.index.json": INDEX,
                "model-1-of-2.safetensors": "",
            },
            False,
        ),
        (ONE_FILE | {"model.safetensors.index.json": "nonsense"}, False),
    ],
)
def test_a_model_that_is_whole_is_used_while_the_hub_fails(
    files: dict[str, str],
    is_whole: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)

    def snapshot(model: str, *, local_files_only: bool = False, **_: Any) -> str:
        if not local_files_only:
            raise ConnectionResetError("Connection reset by peer")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    if is_whole:
        assert download("me/tiny", lambda done, total: None) == tmp_path
        assert "the hub fails (ConnectionResetError: Connection reset by peer)" in caplog.text
    else:
        with pytest.raises(ModelUnavailable, match="cannot download me/tiny: ConnectionReset"):
            download("me/tiny", lambda done, total: None)


HubAndDownload = tuple[Hub, Callable[..., str]]


@pytest.fixture
def hub(tiny_model: Callable[..., Path], tmp_path: Path) -> Iterator[HubAndDownload]:
    """Yield a hub, and a function that downloads from it in a process and returns what it said."""
    server = Hub(tiny_model("llama"))
    program = (
        "import sys, logging\n"
        "logging.basicConfig(level='INFO', format='%(message)s', stream=sys.stdout)\n"
        "from engine.model import hub\n"
        "from engine.model.errors import NotNow, ModelUnavailable\n"
        "hub.FIRST_PAUSE_S = 0.2\n"
        "hub.patience.wait(lambda reason: print('told:', reason, flush=True))\n"
        "try: print(hub.patience.download(sys.argv[1]))\n"
        "except ModelUnavailable as error: print(type(error).__name__, error)\n"
    )

    def run(model: str, **variables: str) -> str:
        given = {"HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
        environ = {**os.environ, **given, "HF_HUB_DISABLE_XET": "1", **variables}
        command = [sys.executable, "-c", program, model]
        done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=120)
        return done.stderr + done.stdout

    yield server, run
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("status", [500, 502, 503, 429])
def test_a_hub_that_fails_is_asked_again(hub: HubAndDownload, status: int) -> None:
    server, run = hub
    server.fails = status

    def heal() -> None:
        while len(server.requests) < 2:
            time.sleep(0.05)
        time.sleep(1)
        server.fails = 0

    threading.Thread(target=heal, daemon=True).start()
    said = run("me/tiny")
    assert "trying again in" in said and "told: me/tiny is not on" in said
    assert said.rstrip().splitlines()[-2:][0] == "told: " and "/snapshots/" in said


def test_a_download_that_is_cut_goes_on(hub: HubAndDownload) -> None:
    server, run = hub
    server.resets = 20  # more than the hub's library tries
    said = run("me/tiny")
    assert "/snapshots/" in said.rstrip().splitlines()[-1]
    assert server.resets == 0


def test_what_the_hub_does_not_have_is_not_asked_for_again(
    hub: HubAndDownload,
) -> None:
    server, run = hub
    assert "ModelUnavailable there is no model me/other" in run("me/other")
    assert "ModelUnavailable me/tiny is not on this machine" in run("me/tiny", HF_HUB_OFFLINE="1")
    server.fails = 403
    assert "ModelUnavailable" in run("me/tiny") and "trying again" not in run("me/tiny")
