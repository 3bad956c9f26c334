"""`mlx-lm-server models`: a real download from a hub here, and the list of what there is."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from services import cli

ROOT = Path(__file__).resolve().parents[2]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
TIMEOUT_S = 120


class Hub(ThreadingHTTPServer):
    """The part of the hub's HTTP API that a download needs, with the model ``me/tiny``."""

    def __init__(self, model: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files = {path.name: path.read_bytes() for path in model.iterdir() if path.is_file()}
        Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        path, _, name = self.path.partition("?")[0].rpartition("/")
        if path.startswith("/api/models/me/tiny/tree"):
            path, name = "/api/models/me/tiny/tree", ""
        if path == "/api/models/me/tiny/tree":
            entries = [
                {"type": "file", "path": each, "size": len(data), "oid": _digest(data)}
                for each, data in self.server.files.items()
            ]
            self._send(json.dumps(entries).encode(), {}, with_body)
        elif self.path.startswith("/api/models/me/tiny"):
            siblings = [{"rfilename": each} for each in self.server.files]
            found = {"id": "me/tiny", "modelId": "me/tiny", "sha": COMMIT, "siblings": siblings}
            self._send(json.dumps(found).encode(), {}, with_body)
        elif path.startswith("/me/tiny/resolve/") and name in self.server.files:
            data = self.server.files[name]
            headers = {"ETag": f'"{_digest(data)}"', "X-Repo-Commit": COMMIT}
            self._send(data, headers, with_body)
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("content-length", "0")
            self.end_headers()

    def _send(self, data: bytes, headers: dict[str, str], with_body: bool) -> None:
        self.send_response(200)
        for name, value in {**headers, "content-length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


def _digest(data: bytes) -> str:
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()


@pytest.fixture(scope="module")
def hub(tiny_model: Callable[..., Path]) -> Iterator[Hub]:
    server = Hub(tiny_model("llama"))
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def home(hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the home of the hub's cache, into which a model was downloaded."""
    home = tmp_path_factory.mktemp("hub")
    done = pull("me/tiny", hub, home)
    assert done.returncode == 0, done.stderr
    assert "info models: downloaded me/tiny: 0.00 GB" in done.stderr
    path = Path(done.stdout.strip())
    assert (path / "model.safetensors").read_bytes() == hub.files["model.safetensors"]
    return home


def pull(name: str, hub: Hub, home: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mlx_lm_server", "models", "pull", name],
        cwd=ROOT,
        # A test in this process may have loaded a tokenizer, which switches the hub off.
        env={**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


@pytest.fixture
def models(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., str]:
    """Return a function that runs the command in this process, with the cache of ``home``."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(home / "hub"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # no demo model there

    def run(*words: str, code: int = 0) -> str:
        assert cli.main(["models", *words]) == code
        out, err = capsys.readouterr()
        return out + err

    return run


def test_a_model_that_was_pulled_is_listed_with_what_fits(models: Callable[..., str]) -> None:
    head, row, *_ = models("--memory-gb", "4").splitlines()
    assert head.split() == ["MODEL", "GB", "CONTEXT", "FITS", "FITS", "x8"]
    assert row.split() == ["me/tiny", "0.00", "2,048", "2,048", "2,048"]
    (found,) = json.loads(models("--json", "--memory-gb=4"))
    assert found["fits"] and found["context"] == {"1": 2048, "8": 2048}


def test_a_model_that_does_not_fit_or_is_not_whole_says_why(
    models: Callable[..., str], home: Path
) -> None:
    text = models("--memory-gb=1")
    assert text.splitlines()[1].split()[-2:] == ["no", "no"]
    assert "me/tiny: 0.0 GB of weights and the least KV cache do not fit in 1.0 GB" in text
    (weights,) = (home / "hub").rglob("snapshots/*/model.safetensors")
    hidden = weights.rename(weights.with_name("elsewhere"))
    try:
        assert "me/tiny: there is no model*.safetensors" in models()
    finally:
        hidden.rename(weights)


def test_one_model_is_shown_by_bits_of_its_cache(
    models: Callable[..., str], tiny_model: Callable[..., Path], home: Path
) -> None:
    text = models("show", str(tiny_model("llama")), "--memory-gb=4")
    rows = [line.split() for line in text.splitlines()[-4:]]
    assert [row[0] for row in rows] == ["1", "4", "8", "16"]
    assert rows[0][1:3] == ["2,048", "(all)"]
    assert "models pull gets it" in models("show", "no/such", code=1)
    assert "NAME is missing" in models("show", code=2)


def test_a_model_that_the_hub_does_not_have_is_one_line(hub: Hub, tmp_path: Path) -> None:
    done = pull("me/none", hub, tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("mlx-lm-server models pull: there is no model me/none")
    assert done.stderr.count("\n") == 1
