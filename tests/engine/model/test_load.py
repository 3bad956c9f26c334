from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import mlx_lm
import pytest

from engine.model.context import DEFAULT_CONTEXT_LENGTH
from engine.model.errors import ModelUnavailable
from engine.model.load import TokenizerOptions, fingerprint, load, resolve
from tests.tiny_models import CONTEXT, EOS, KINDS, VOCAB_SIZE, Kind, make_tiny

TinyModel = Callable[..., Path]


def change_config(model: Path, **changes: object) -> None:
    config = model / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))


@pytest.mark.parametrize("kind", KINDS)
def test_every_tiny_model_loads_and_generates(tiny_model: TinyModel, kind: Kind) -> None:
    loaded = load(resolve(str(tiny_model(kind))))
    prompt = loaded.tokenizer.encode("Hello é!")
    assert mlx_lm.generate(loaded.model, loaded.tokenizer, prompt, max_tokens=4)
    assert loaded.vocab_size == VOCAB_SIZE
    assert loaded.eos_token_ids == (EOS,)
    stretched = {"mamba": DEFAULT_CONTEXT_LENGTH, "deepseek_v2": 2 * CONTEXT}  # by YaRN
    assert loaded.context_length == stretched.get(kind, CONTEXT)
    assert {"config.json", "tokenizer.json"} <= set(loaded.tokenizer_files)
    assert all(path.is_file() for path in loaded.tokenizer_files.values())


def test_options_replace_the_tokens_and_the_template_of_the_tokenizer(llama: Path) -> None:
    options = TokenizerOptions(eos_token="<|endoftext|>", chat_template="just this")
    loaded = load(llama, tokenizer_options=options)
    assert loaded.eos_token_ids == (0, EOS)
    message = [{"role": "user", "content": "Hello"}]
    assert loaded.tokenizer.apply_chat_template(message, tokenize=False) == "just this"


@pytest.mark.parametrize(
    "model", ["/nowhere/at/all", "./nowhere", "nowhere", "~no-such-user/model", 300 * "a"]
)
def test_a_missing_path_is_reported_in_one_line(model: str) -> None:
    with pytest.raises(ModelUnavailable, match=f"there is no model at {model}") as caught:
        resolve(model)
    assert "\n" not in str(caught.value)


def test_a_hub_id_without_a_network_is_reported_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelUnavailable, match="some/model") as caught:
        resolve("some/model")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_the_error_of_an_incomplete_model_names_the_missing_file(
    tmp_path: Path, missing: str
) -> None:
    path = make_tiny("llama", tmp_path / "model")
    (path / missing).unlink()
    with pytest.raises(ModelUnavailable, match="is not a model directory: it has no"):
        resolve(str(path))


def test_an_unknown_architecture_is_reported_in_one_line(tmp_path: Path) -> None:
    path = make_tiny("llama", tmp_path / "model")
    change_config(path, model_type="unheard_of")
    with pytest.raises(ModelUnavailable, match="unheard_of") as caught:
        load(path)
    assert "\n" not in str(caught.value)


def test_the_fingerprint_depends_on_the_content_and_not_on_the_path(tmp_path: Path) -> None:
    here = make_tiny("llama", tmp_path / "here", seed=1)
    there = Path(shutil.copytree(here, tmp_path / "there"))
    assert fingerprint(here) == fingerprint(there)

    weights = there / "model.safetensors"
    changed = bytearray(weights.read_bytes())
    changed[-1] ^= 1
    weights.write_bytes(changed)
    assert fingerprint(here) != fingerprint(there)


def test_the_fingerprint_depends_on_the_code_that_a_model_brings(tmp_path: Path) -> None:
    model = make_tiny("llama", tmp_path / "model", seed=1)
    code = model / "own.py"
    code.write_text("rope = 1")
    before = fingerprint(model)
    code.write_text("rope = 2")
    assert fingerprint(model) == before  # nobody runs it
    change_config(model, model_file="own.py")
    before = fingerprint(model)
    code.write_text("rope = 3")
    assert fingerprint(model) != before


def test_the_fingerprint_of_a_big_model_changes_with_its_last_weight(
    demo_model: Path, tmp_path: Path
) -> None:
    for file in demo_model.iterdir():
        shutil.copy(file, tmp_path)
    assert fingerprint(tmp_path) == fingerprint(demo_model)
    with (tmp_path / "model.safetensors").open("r+b") as weights:
        weights.seek(-4, 2)
        weights.write(b"\x01\x02\x03\x04")
    assert fingerprint(tmp_path) != fingerprint(demo_model)


@pytest.mark.parametrize(
    ("kind", "changes", "expected"),
    [
        ("llama", {}, 100),
        ("gemma3", {}, 100),
        ("gemma3", {"sliding_window_pattern": 9}, CONTEXT),
        ("gemma3", {"sliding_window_pattern": 9, "sliding_window": 101}, 100),
        ("mamba", {}, DEFAULT_CONTEXT_LENGTH),
    ],
)
def test_max_kv_size_limits_the_context_unless_the_model_keeps_less_anyway(
    tmp_path: Path, kind: Kind, changes: dict[str, int], expected: int
) -> None:
    path = make_tiny(kind, tmp_path / "model")
    change_config(path, **changes)
    own = load(path).context_length
    assert load(path, max_kv_size=100).context_length == expected
    assert load(path, max_kv_size=own + 1).context_length == own
