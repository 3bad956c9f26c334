"""Products with quantized weights against the same products in double precision."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn

from engine.cpu.onnx import graphs
from engine.cpu.onnx.codes import codes_of
from engine.cpu.onnx.graphs import Graph, Unsupported
from engine.cpu.onnx.multiplier import ExpertMultiplier, Multiplier
from engine.cpu.onnx.quantized import Precision, QuantizedWeight, rows_with_same_bits
from engine.cpu.onnx.weights import DenseWeight, Weight, join, quantized_weight, weight_of

KINDS = [("affine", bits, group) for bits in (2, 3, 4, 5, 6, 8) for group in (32, 64, 128)]
KINDS += [("mxfp4", 4, 32), ("nvfp4", 4, 16), ("mxfp8", 8, 32)]
OUT, WIDTH = 72, 384
PRECISIONS: tuple[Precision, ...] = ("exact", "compact", "fast")


def quantized(mode: str, bits: int, group: int, seed: int = 0, *shape: int) -> tuple[Any, Any, Any]:
    """Return MLX's arrays of a random matrix, None in place of biases where it has none."""
    mx.random.seed(seed)
    weight = 0.1 * mx.random.normal((*shape, OUT, WIDTH)) + 0.02
    packed, scales, *biases = mx.quantize(weight, group, bits, mode=mode)
    return packed, scales, biases[0] if biases else None


def four_bits(group: int, seed: int = 0) -> Weight:
    arrays = quantized("affine", 4, group, seed)
    return quantized_weight(*arrays, "fast", group_size=group, bits=4, mode="affine")


def dequantized(arrays: Any, mode: str, bits: int, group: int) -> Any:
    kind: Any = {"group_size": group, "bits": bits, "mode": mode, "dtype": mx.float32}
    return np.asarray(mx.dequantize(*arrays, **kind)).astype(np.float64)


def activations(rows: int, seed: int = 1) -> Any:
    return np.random.default_rng(seed).standard_normal((rows, WIDTH), np.float32)


@pytest.mark.parametrize(("mode", "bits", "group"), KINDS)
def test_products_are_those_of_the_dequantized_weight(mode: str, bits: int, group: int) -> None:
    arrays = quantized(mode, bits, group)
    whole = dequantized(arrays, mode, bits, group)
    kind: Any = {"group_size": group, "bits": bits, "mode": mode}
    for precision in PRECISIONS:
        weight = quantized_weight(*arrays, precision, **kind)
        assert weight.shape == (OUT, WIDTH)
        multiply = Multiplier(weight)
        assert np.allclose(weight.gather(np.array([3, 70])), whole[[3, 70]], atol=1e-6)
        for rows in (1, 2, 5, 40):
            x = activations(rows)
            off = np.abs(multiply(x) - x @ whole.T)
            assert off.max() <= bound(x, arrays, whole, precision, mode), (precision, rows)


def bound(x: Any, arrays: Any, whole: Any, precision: Precision, mode: str) -> float:
    """Return the most that a product may be off.

    Eight bits round an activation by up to 1/254 of the largest of its group. That is multiplied
    by the weight's distance from the middle of its codes, at most twice the largest weight here.
    Errors of a row are independent: five standard deviations."""
    fp32 = 2e-6 * np.abs(x).max() * np.abs(whole).sum(axis=1).max()
    if precision != "fast" or mode == "mxfp8":
        return float(fp32)
    step = np.abs(x).max() / 254
    return float(fp32 + 5 * step / np.sqrt(3) * 2 * np.abs(whole).max() * np.sqrt(WIDTH))


@pytest.mark.parametrize(
    ("mode", "bits", "group"), [kind for kind in KINDS if kind[0] != "affine" or kind[2] == 64]
)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_product_does_not_change_when_another_is_made(
    mode: str, bits: int, group: int, precision: Precision
) -> None:
    """Weights of one shape lend each other the memory of scales that are packed."""
    kind: Any = {"group_size": group, "bits": bits, "mode": mode}
    first, second = (
        quantized_weight(*quantized(mode, bits, group, seed), precision, **kind) for seed in (0, 1)
    )
    multiply, x = Multiplier(first), activations(40)
    before = [multiply(x[:rows]) for rows in (1, 2, 40)]
    lent = len(graphs._scratch)
    assert not np.array_equal(Multiplier(second)(x), before[-1])
    assert len(graphs._scratch) == lent, "scales that are packed are not kept"
    for rows, found in zip((1, 2, 40), before, strict=True):
        assert np.array_equal(multiply(x[:rows]), found)
    whole = dequantized(quantized(mode, bits, group), mode, bits, group)
    assert np.allclose(first.gather(np.arange(OUT)), whole, atol=1e-6)


def test_the_scale_of_a_whole_nvfp4_weight_counts() -> None:
    mx.random.seed(0)
    weight = mx.random.normal((OUT, WIDTH))
    largest = mx.max(mx.abs(weight))
    codes, scales = mx.quantize(weight, 16, 4, mode="nvfp4", global_scale=largest)
    kind: Any = {"group_size": 16, "bits": 4, "mode": "nvfp4", "global_scale": largest}
    expected = mx.dequantize(codes, scales, None, dtype=mx.float32, **kind)
    found = codes_of(codes, scales, None, **kind).dense()
    assert np.allclose(found, np.asarray(expected), rtol=1e-5)


@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, 64), (4, 128), (8, 64), (2, 64)])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_row_has_the_same_bits_among_any_others(
    bits: int, group: int, precision: Precision
) -> None:
    """A multiplier pads to an even number of rows where this processor needs it. With codes and
    activations in fp32 a row alone has a kernel of its own."""
    kind: Any = {"group_size": group, "bits": bits, "mode": "affine"}
    multiply = Multiplier(quantized_weight(*quantized("affine", bits, group), precision, **kind))
    x = activations(67)
    many = multiply(x)
    for rows in (1, 2, 3, 5, 8, 16, 33):
        found, expected = multiply(x[7 : 7 + rows]), many[7 : 7 + rows]
        if rows == 1 and precision == "compact":
            assert np.allclose(found, expected, atol=1e-5)
        else:
            assert np.array_equal(found, expected), rows


def test_padding_is_decided_on_this_processor() -> None:
    weight = four_bits(64)
    assert weight.same_bits == rows_with_same_bits(4, 64, 4)
    assert weight.pads_rows == (weight.same_bits == "even")


def test_joined_weights_give_the_products_side_by_side() -> None:
    parts = [four_bits(64, seed) for seed in (0, 1)]
    x = activations(4)
    both = np.concatenate([Multiplier(part)(x) for part in parts], axis=1)
    assert np.array_equal(Multiplier(join(parts))(x), both)
    other = four_bits(32)
    with pytest.raises(Unsupported, match="different quant"):
        join([parts[0], other])
    with pytest.raises(Unsupported, match="different kinds"):
        join([parts[0], DenseWeight(np.zeros((2, WIDTH), np.float32))])


def test_each_row_meets_its_expert() -> None:
    arrays = quantized("affine", 4, 64, 0, 5)
    packed, scales, biases = arrays
    whole = dequantized(arrays, "affine", 4, 64)
    kind: Any = {"group_size": 64, "bits": 4, "mode": "affine"}
    experts = [
        quantized_weight(packed[i], scales[i], biases[i], "compact", **kind) for i in range(5)
    ]
    multiply = ExpertMultiplier(experts)
    for chosen in ([3], [0, 0, 4], [2, 0, 2, 4, 2, 0, 0, 1, 2]):
        x = activations(len(chosen))
        expected = np.stack([row @ whole[i].T for row, i in zip(x, chosen, strict=True)])
        assert np.allclose(multiply(x, np.array(chosen)), expected, atol=1e-4)
        alone = np.concatenate(
            [multiply(x[i : i + 1], np.array([each])) for i, each in enumerate(chosen)]
        )
        assert np.allclose(multiply(x, np.array(chosen)), alone, atol=1e-5)


def test_only_linear_layers_and_embeddings_have_weights() -> None:
    with pytest.raises(Unsupported, match="a RMSNorm is not a layer in fp32 or quantized"):
        weight_of(nn.RMSNorm(8))
    half = nn.Linear(8, 8)
    half.weight = half.weight.astype(mx.float16)
    with pytest.raises(Unsupported, match="a Linear is not"):
        weight_of(half)


def test_a_symmetric_weight_takes_one_product() -> None:
    """Of values without an offset there are no sums of groups to multiply."""
    codes = codes_of(*quantized("mxfp4", 4, 32), group_size=32, bits=4, mode="mxfp4")
    graph = Graph()
    QuantizedWeight(codes, "fast").product(graph, graph.input("x", "rows", WIDTH))
    assert [node.op_type for node in graph._nodes] == ["MatMulNBits"]
