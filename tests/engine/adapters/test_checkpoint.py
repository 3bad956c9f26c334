"""Files of adapters: read in both formats, or refused with one clear line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from engine.adapters.checkpoint import AdapterError, Shape, read
from tests.engine.adapters.random_adapters import random_adapter

SHAPES = {"model.layers.0.self_attn.q_proj": Shape(32, 16), "model.layers.0.mlp.up": Shape(32, 48)}
CONFIG, FILE = "adapter_config.json", "adapters.safetensors"
Weights = dict[str, np.ndarray[Any, Any]]


def change(path: Path, **values: object) -> None:
    config = json.loads((path / CONFIG).read_text())
    (path / CONFIG).write_text(json.dumps(config | values))


def test_both_formats_of_one_adapter_have_one_digest(tmp_path: Path) -> None:
    ours = read(random_adapter(SHAPES, tmp_path / "a", 1), SHAPES, 16)
    peft = read(random_adapter(SHAPES, tmp_path / "b", 1, peft=True), SHAPES, 16)
    assert ours.digest == peft.digest
    assert ours.rank == 4
    assert ours.digest != read(random_adapter(SHAPES, tmp_path / "c", 2), SHAPES, 16).digest


def test_the_scale_of_peft_is_alpha_by_rank_or_by_its_root(tmp_path: Path) -> None:
    path = random_adapter(SHAPES, tmp_path / "a", 1, peft=True)
    name = next(iter(SHAPES))
    plain = read(path, SHAPES, 16).layers[name].up
    change(path, lora_alpha=16)
    assert np.allclose(read(path, SHAPES, 16).layers[name].up, 2 * plain)
    change(path, use_rslora=True)
    assert np.allclose(read(path, SHAPES, 16).layers[name].up, 4 * plain)
    for key in ("self_attn.q_proj", "q_proj", "^" + name, r"layers\.\d+\..*q_proj", ".*q_proj"):
        change(path, alpha_pattern={"k_proj": 99, key: 8})
        assert np.allclose(read(path, SHAPES, 16).layers[name].up, 2 * plain), key
    change(path, alpha_pattern={"proj": 8, "q_pro": 8})
    assert np.allclose(read(path, SHAPES, 16).layers[name].up, 4 * plain)


def test_weights_in_bfloat16_are_read(tmp_path: Path) -> None:
    import mlx.core as mx

    path = random_adapter(SHAPES, tmp_path / "a", 1)
    file, exact = path / FILE, read(path, SHAPES, 16)
    weights = {name: array.astype(mx.bfloat16) for name, array in mx.load(str(file)).items()}
    mx.save_safetensors(str(file), weights)
    found = read(path, SHAPES, 16)
    for name, (down, _) in exact.layers.items():
        assert np.allclose(found.layers[name].down, down, rtol=2**-8)


def rewrite(path: Path, change: Callable[[Weights], Weights]) -> None:
    """Change the weights of the adapter in ``path``."""
    save_file(change(load_file(path / FILE)), path / FILE)


def without(weights: Weights, missing: str) -> Weights:
    return {name: array for name, array in weights.items() if name != missing}


WIDER = {name: Shape(shape.inputs * 2, shape.outputs) for name, shape in SHAPES.items()}
ELSEWHERE = {"model.layers.7.self_attn.q_proj": Shape(32, 16)}
HALF = "model.layers.0.mlp.up.lora_a"
BAD: list[tuple[Callable[[Path], object], str]] = [
    (lambda path: random_adapter(WIDER, path, 1), "an adapter of another model"),
    (
        lambda path: random_adapter(ELSEWHERE, path, 1),
        r"no linear layers model\.layers\.7\.self_attn\.q_proj",
    ),
    (
        lambda path: random_adapter(SHAPES, path, 1, rank=17),
        "has rank 17, over --max-adapter-rank, which is 16",
    ),
    (lambda path: rewrite(path, lambda old: without(old, HALF)), f"it lacks {re.escape(HALF)}"),
    (
        lambda path: rewrite(path, lambda old: old | {"model.norm.weight": np.ones(3)}),
        "weights that are not LoRA's: model.norm.weight",
    ),
    (lambda path: rewrite(path, lambda old: {n: old[n] * np.nan for n in old}), "not finite"),
    (
        lambda path: rewrite(path, lambda old: {n: old[n].astype(np.int32) for n in old}),
        "its weights are in I32; only F32, F16, BF16 are read",
    ),
    (
        lambda path: (path / FILE).write_bytes((path / FILE).read_bytes()[:-100]),
        "adapters.safetensors ends too early",
    ),
    (lambda path: (path / FILE).write_bytes(b"\xff" * 64), "is not a safetensors file"),
    (
        lambda path: change(path, peft_type="LORA"),
        "it has no adapter_model.safetensors; weights are only read from safetensors",
    ),
    (lambda path: (path / CONFIG).unlink(), "it has no adapter_config.json"),
    (lambda path: (path / CONFIG).write_text("{"), "is not JSON"),
    (lambda path: (path / CONFIG).write_text("[" * 100_000), "is not JSON"),
    (lambda path: (path / CONFIG).write_text("[1]"), "is not a JSON object"),
    (lambda path: change(path, fine_tune_type="dora"), "fine_tune_type is 'dora'"),
    (lambda path: change(path, lora_parameters={"scale": "big"}), "scale is 'big'"),
    (lambda path: change(path, lora_parameters=None), "TypeError"),
    (lambda path: change(path, peft_type="IA3"), "peft_type is 'IA3'"),
    (lambda path: change(path, peft_type="LORA", use_dora=True), "it sets use_dora"),
    (lambda path: change(path, peft_type="LORA", bias="all"), "it changes biases"),
    (
        lambda path: change(path, peft_type="LORA", init_lora_weights="pissa_niter_16"),
        "init_lora_weights is 'pissa_niter_16'",
    ),
    (
        lambda path: change(path, peft_type="LORA", alora_invocation_tokens=[1]),
        "it sets alora_invocation_tokens",
    ),
    (lambda path: change(path, lora_parameters={"scale": 10**400}), "OverflowError"),
]


@pytest.mark.parametrize(("spoil", "reason"), BAD, ids=[reason for _, reason in BAD])
def test_an_adapter_that_does_not_fit_is_one_clear_line(
    tmp_path: Path, spoil: Callable[[Path], object], reason: str
) -> None:
    path = random_adapter(SHAPES, tmp_path / "a", 1)
    spoil(path)
    with pytest.raises(AdapterError, match=reason) as seen:
        read(path, SHAPES, 16)
    assert str(seen.value).startswith(f"the adapter in {path} cannot be used: ")
    assert "\n" not in str(seen.value)


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="there is no such directory"):
        read(tmp_path / "nowhere", SHAPES, 16)
