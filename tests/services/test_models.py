"""`mlx-lm-server models`: a real download from a hub here, and the list of what there is."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from services.commands import cli
from services.commands.models.local import examined
from shared.settings import Settings
from tests.commands import run_command
from tests.stand_ins.hub import Hub
from tests.vision_models import make_vision_model


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
    # A test in this process may have loaded a tokenizer, which switches the hub off.
    cache = {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0"}
    return run_command("models", "pull", name, **cache)


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
    assert head.split() == ["MODEL", "GB", "IMAGES", "CONTEXT", "FITS", "FITS", "x8"]
    assert row.split() == ["me/tiny", "0.00", "-", "2,048", "2,048", "2,048"]
    (found,) = json.loads(models("--json", "--memory-gb=4"))
    assert found["fits"] and found["context"] == {"1": 2048, "8": 2048}
    assert not found["takes_images"]


def test_a_model_that_takes_images_is_named_as_one(tmp_path: Path) -> None:
    folder = make_vision_model("llava", tmp_path / "seeing")
    assert examined("me/seeing", folder, Settings(memory_gb=4)).takes_images


def test_a_model_that_does_not_fit_or_is_not_whole_says_why(
    models: Callable[..., str], home: Path
) -> None:
    text = models("--memory-gb=1")
    assert text.splitlines()[1].split()[-2:] == ["no", "no"]
    assert "me/tiny: 0.0 GB of weights and the smallest KV cache do not fit in 1.0 GB" in text
    (weights,) = (home / "hub").rglob("snapshots/*/model.safetensors")
    hidden = weights.rename(weights.with_name("elsewhere"))
    try:
        assert "me/tiny: there are no model*.safetensors files" in models()
    finally:
        hidden.rename(weights)


def test_a_model_whose_header_is_too_deep_to_read_has_a_reason(tmp_path: Path) -> None:
    header = 100_000 * b"["
    weights = len(header).to_bytes(8, "little") + header
    (tmp_path / "model.safetensors").write_bytes(weights)
    found = examined("me/deep", tmp_path, Settings())
    assert found.trouble and "model.safetensors is not a safetensors file" in found.trouble


def test_one_model_is_shown_by_bits_of_its_cache(
    models: Callable[..., str], tiny_model: Callable[..., Path]
) -> None:
    text = models("show", str(tiny_model("llama")), "--memory-gb=4")
    rows = [line.split() for line in text.splitlines()[-4:]]
    assert [row[0] for row in rows] == ["1", "4", "8", "16"]
    assert rows[0][1:3] == ["2,048", "(all)"]
    assert "models pull" in models("show", "no/such", code=1)
    assert "NAME is required" in models("show", code=2)


def test_a_model_that_the_hub_does_not_have_is_one_line(hub: Hub, tmp_path: Path) -> None:
    done = pull("me/none", hub, tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("mlx-lm-server models pull: there is no model me/none")
    assert done.stderr.count("\n") == 1
