"""Layers outside of MLX against mlx-lm's own computation with the same quantized weights."""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.switch_layers import SwitchLinear
from mlx_lm.tuner.lora import LoRALinear

from engine.cpu import layers
from engine.cpu.layers import FP32_SHARE, Layers, chosen_precisions
from tests.engine.conftest import Wrap
from zoo.build import build

pytestmark = pytest.mark.skipif(mx.default_device() == mx.gpu, reason="for CPUs")

ARCHITECTURES = "deepseek_v3 falcon_h1 gemma2 gpt_oss llama mamba2 phi3 qwen3_moe".split()
OTHERS = (
    "apertus cohere2 ernie4_5 exaone4 gemma3_text glm4 granite jamba lfm2 mixtral nemotron_h olmo2 "
    "qwen3_next smollm3"
).split()
NAMES = [*ARCHITECTURES, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]
PROMPT, REST = (5, 6, 7, 8, 9, 3, 4), (4, 9)


def quantized(name: str, bits: int = 4, mode: str = "affine", dtype: Any = None) -> Any:
    model = build(name)
    if dtype is not None:
        model.set_dtype(dtype)

    def fits(_: str, module: Any) -> bool:
        return hasattr(module, "to_quantized") and module.weight.shape[-1] % 32 == 0

    nn.quantize(model, 32, bits, mode=mode, class_predicate=fits)
    mx.eval(model.parameters())
    return model


def logits(model: Any) -> Any:
    """Return the logits of a prompt and of two more tokens."""
    cache = make_prompt_cache(model)
    pieces = [model(mx.array([ids]), cache=cache)[0] for ids in (PROMPT, *([i] for i in REST))]
    return np.asarray(mx.concatenate(pieces).astype(mx.float32))


def distance(found: Any, expected: Any) -> float:
    """Return the largest difference in standard deviations of what is expected."""
    finite = np.isfinite(expected)
    assert np.array_equal(np.isfinite(found), finite)
    return float(np.abs(found - expected)[finite].max() / expected[finite].std())


@cache
def mlx_logits(name: str) -> Any:
    """Return the logits of ``quantized(name)``, which several tests compare with."""
    return logits(quantized(name))


@pytest.mark.parametrize("name", NAMES)
def test_exact_logits_are_those_of_mlx(name: str) -> None:
    expected = mlx_logits(name)
    model = quantized(name)
    moved = Layers(model, "compact", dense=False)
    assert moved.nbytes > 0
    assert distance(logits(model), expected) < 3e-5
    first = logits(model)
    moved.keep_packed()  # what the model's code reads itself is still there
    assert np.array_equal(logits(model), first)


@pytest.mark.parametrize(
    ("bits", "mode"),
    [(2, "affine"), (3, "affine"), (6, "affine"), (8, "affine"), (4, "mxfp4"), (8, "mxfp8")],
)
@pytest.mark.parametrize("name", ["llama", pytest.param("qwen3_moe", marks=pytest.mark.slow)])
def test_every_width_is_exact(name: str, bits: int, mode: str) -> None:
    expected = logits(quantized(name, bits, mode))
    model = quantized(name, bits, mode)
    Layers(model, "exact", dense=False)
    assert distance(logits(model), expected) < 3e-5


@pytest.mark.parametrize("name", ["deepseek_v3", "llama", "mamba2", "qwen3_moe", *NAMES[8:]])
def test_eight_bits_of_activations_round_by_as_much_as_they_may(name: str) -> None:
    """A product is off by up to 1/254 of the largest activation of a group, and by 0.3 of that as
    a root mean square. Products of random models add up as independent errors: of the spread of
    logits, 4 standard deviations of 1/254 for each of seven products in four layers. Where two
    experts have nearly the same score, rounding may choose the other one, and norms of heads make
    small vectors large: two thirds of the positions have to be so near."""
    expected = mlx_logits(name)
    model = quantized(name)
    Layers(model, "fast", dense=False)
    off = [distance(*each) for each in zip(logits(model), expected, strict=True)]
    found = np.quantile(off, 2 / 3)
    assert 1e-3 < found < 4 * 3 / 254 * np.sqrt(7 * 4)


def test_what_is_not_quantized_in_a_16_bit_model_becomes_fp32() -> None:
    model = quantized("llama", dtype=mx.bfloat16)
    wide = quantized("llama", dtype=mx.bfloat16)
    wide.set_dtype(mx.float32)
    expected = logits(wide)
    Layers(model, "exact", dense=False)
    assert model(mx.array([[5]])).dtype == mx.float32
    assert distance(logits(model), expected) < 3e-5


def test_weights_are_kept_once_unless_the_model_reads_them_itself() -> None:
    model = quantized("llama")
    moved = Layers(model, "fast", dense=False)
    layer, other = (model.model.layers[number].mlp.up_proj for number in (0, 1))
    logits(model)
    assert other.weight.size  # as code of a model may do
    moved.keep_packed()
    assert not {"weight", "scales", "biases"} & set(layer)
    assert "weight" in other
    assert "weight" in model.model.embed_tokens  # tokens are looked up in it
    moved.drop()
    assert moved.nbytes == 0


def test_an_adapter_over_a_quantized_layer_works_as_before() -> None:
    def adapted() -> Any:
        model = quantized("llama")
        mx.random.seed(4)
        for block in model.model.layers:
            block.mlp.up_proj = LoRALinear.from_base(block.mlp.up_proj)
            block.mlp.up_proj.lora_b = 0.1 * mx.random.normal(block.mlp.up_proj.lora_b.shape)
        return model

    expected, model = logits(adapted()), adapted()
    Layers(model, "exact", dense=False)
    assert distance(logits(model), expected) < 3e-5
    assert distance(mlx_logits("llama"), expected) > 0.1


@pytest.mark.parametrize("ours", [True, False])
def test_dense_layers_move_if_that_is_faster(ours: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([1.0, 2.0] * 99 if ours else [2.0, 1.0] * 99)
    monkeypatch.setattr(layers, "_seconds", lambda layer: next(seconds))
    expected, model = logits(build("qwen3_moe")), build("qwen3_moe")
    moved = Layers(model, "fast", dense=True)
    assert (moved.nbytes > 0) == ours
    assert distance(logits(model), expected) < 3e-5


def test_dense_layers_are_timed_once_for_each_shape(wrap: Wrap) -> None:
    shapes: list[Any] = []

    @wrap(layers, "_seconds")
    def noted(seconds: Any, layer: Any) -> float:
        shapes.append(layer["weight"].shape)
        return seconds(layer)

    Layers(build("qwen3_moe"), "fast", dense=True)
    assert len(shapes) == 2 * len(set(shapes)) > 4  # by MLX and by ONNX Runtime


@pytest.mark.parametrize("wanted", ["compact", "fast"])
def test_codes_stay_codes_if_that_is_wanted(wanted: Any) -> None:
    found = chosen_precisions(quantized("llama"), wanted, 1 << 40)
    assert set(found.values()) == {wanted}


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_codes_become_fp32_as_far_as_a_part_of_the_memory_holds_them(name: str, bits: int) -> None:
    model = quantized(name, bits)

    def in_fp32(memory_bytes: int) -> list[str]:
        found = chosen_precisions(model, "auto", memory_bytes)
        assert set(found.values()) <= {"exact", "compact"}
        return [name for name, precision in found.items() if precision == "exact"]

    every = in_fp32(1 << 40)
    kinds = {"Linear", "Embedding", "SwitchLinear"}
    multiplied = [
        (each, module)
        for each, module in model.named_modules()
        if type(module).__name__.removeprefix("Quantized") in kinds
        and (each != "model.embed_tokens" or "lm_head" not in model)
    ]
    assert sorted(every) == sorted(each for each, module in multiplied if "scales" in module)
    sizes = {each: module["weight"].size * 32 // bits * 4 for each, module in multiplied}
    half = in_fp32(int(sum(sizes.values()) / 2 / FP32_SHARE))
    assert 0 < sum(sizes[each] for each in half) <= sum(sizes.values()) / 2
    assert not any("switch_mlp" in each for each in half)  # a row needs few of them
    for each in half:  # those with one input are one product
        parent = each.rpartition(".")[0]
        assert {other for other in every if other.rpartition(".")[0] == parent} <= {*half}
    assert not in_fp32(0)


def test_a_model_with_layers_of_both_kinds_is_exact() -> None:
    expected = mlx_logits("llama")
    model = quantized("llama")
    found = chosen_precisions(model, "auto", 1 << 40)
    found |= {name: "compact" for name in found if ".layers.1." in name}
    assert len(set(found.values())) == 2
    Layers(model, found, dense=False)
    assert distance(logits(model), expected) < 3e-5


def test_experts_in_any_shape_of_rows() -> None:
    """Rows of a batch, rows sorted by expert, and several rows of one expert."""
    mx.random.seed(1)
    stock, moved = (SwitchLinear(32, 48, 4) for _ in range(2))
    moved.weight, moved.bias = stock.weight, stock.bias = stock.weight, mx.random.normal((4, 48))
    layers._replace(moved, "exact")
    for shape, chosen in (
        ((3, 1, 1, 32), [[0, 2], [3, 3], [1, 0]]),
        ((2, 3, 1, 1, 32), [[[0, 1], [1, 2], [3, 0]], [[2, 2], [0, 3], [1, 1]]]),
        ((4, 1, 32), [0, 0, 2, 3]),
        ((2, 5, 32), [1, 3]),
    ):
        x, indices = mx.random.normal(shape), mx.array(chosen)
        assert mx.allclose(moved(x, indices), stock(x, indices), atol=1e-5), shape
