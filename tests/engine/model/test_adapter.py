"""LoRA adapters: applied exactly as by mlx-lm, or refused with one clear line."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import mlx_lm
import pytest

from engine.model.errors import AdapterUnusable, ModelUnavailable
from engine.model.load import load
from engine.replica.build import build_replica
from shared.exits import EXIT_CONFIG
from shared.settings import Settings
from tests.tiny_models import make_adapter

PROMPT = mx.array([[5, 80, 3, 200, 9]])


@pytest.fixture
def adapter(llama: Path, tmp_path: Path) -> Path:
    return make_adapter(llama, tmp_path / "adapter")


def test_logits_are_those_of_mlx_lm_with_the_same_adapter(llama: Path, adapter: Path) -> None:
    plain = load(llama).model(PROMPT)
    ours = load(llama, adapter_path=adapter).model(PROMPT)
    theirs = mlx_lm.load(str(llama), adapter_path=str(adapter))[0](PROMPT)
    assert mx.allclose(ours, theirs, atol=1e-5)
    assert not mx.allclose(ours, plain, atol=0.1)


def test_blocks_with_an_adapter_have_names_of_their_own(
    llama: Path, adapter: Path, tmp_path: Path
) -> None:
    other = make_adapter(llama, tmp_path / "other", seed=1)
    same = Path(shutil.copytree(adapter, tmp_path / "same"))

    def namespace(path: Path | None) -> bytes:
        return build_replica(load(llama, adapter_path=path), Settings(num_blocks=64)).namespace

    plain, first, second, third = map(namespace, (None, adapter, other, same))
    assert len({plain, first, second}) == 3
    assert first == third


def test_a_missing_adapter_directory_is_reported(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match="there is no adapter at"):
        load(llama, adapter_path=tmp_path / "nowhere")


CONFIG, FILE = "adapter_config.json", "adapters.safetensors"


def rewrite(adapter: Path, change: Callable[[str, mx.array], dict[str, mx.array]]) -> None:
    """Replace each of the weights by what ``change`` makes of its name and itself."""
    file = str(adapter / FILE)
    changed: dict[str, mx.array] = {}
    for name, array in mx.load(file).items():
        changed |= change(name, array)
    mx.save_safetensors(file, changed)


def without_half_of_a_pair(adapter: Path) -> None:
    """mlx-lm would fill it with random numbers."""
    missing = "v_proj.lora_a"
    rewrite(adapter, lambda name, array: {} if name.endswith(missing) else {name: array})


MISSING = {"without config": CONFIG, "without weights": FILE}
SPOILT: dict[str, Callable[[Path], object]] = {
    "without config": lambda path: (path / MISSING["without config"]).unlink(),
    "without weights": lambda path: (path / MISSING["without weights"]).unlink(),
    "cut off": lambda path: (path / FILE).write_bytes((path / FILE).read_bytes()[:200]),
    "wider": lambda path: rewrite(path, lambda name, one: {name: mx.concatenate([one, one])}),
    "other layers": lambda path: rewrite(
        path, lambda name, one: {name.replace("q_proj", "query"): one}
    ),
    "half of a pair": without_half_of_a_pair,
    "no JSON": lambda path: (path / CONFIG).write_text("{"),
    "other JSON": lambda path: (path / CONFIG).write_text("[1]"),
    "another library's": lambda path: (path / CONFIG).write_text('{"peft_type": "LORA", "r": 8}'),
}


@pytest.mark.parametrize("how", SPOILT)
def test_an_adapter_that_does_not_fit_is_one_clear_line(
    llama: Path, adapter: Path, how: str
) -> None:
    SPOILT[how](adapter)
    reason = f"cannot use the adapter in {adapter}: "
    if how in MISSING:
        reason = f"is not an adapter: {MISSING[how]} is missing"
    with pytest.raises(AdapterUnusable, match=reason) as seen:
        load(llama, adapter_path=adapter)
    assert "\n" not in str(seen.value)


def test_an_engine_with_a_bad_adapter_ends_with_a_config_error(llama: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "services.processes.engine", f"--model={llama}"]
    command += [f"--adapter-path={tmp_path}", f"--engine-socket=ipc://{tmp_path}/e"]
    ended = subprocess.run(command, env=os.environ, capture_output=True, text=True, timeout=120)
    assert ended.returncode == EXIT_CONFIG
    assert "is not an adapter: adapter_config.json is missing" in ended.stderr
    assert "Traceback" not in ended.stderr
