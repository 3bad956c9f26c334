"""Weights of linear layers and embeddings in ONNX Runtime's graphs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from numpy.typing import NDArray

from engine.cpu.onnx import file_rows
from engine.cpu.onnx.codes import WIDER, Array, codes_of, lying_codes
from engine.cpu.onnx.file_rows import FileRows
from engine.cpu.onnx.graphs import Graph, Unsupported
from engine.cpu.onnx.quantized import Precision, QuantizedWeight, SameBits


class Weight(Protocol):
    """The weight of a linear layer or of an embedding, without a bias."""

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""

    @property
    def pads_rows(self) -> bool:
        """Whether an odd number of rows is padded, so that each row has the same bits."""

    @property
    def same_bits(self) -> SameBits:
        """The numbers of rows for which a row of the product has the same bits."""

    def product(self, graph: Graph, x: str) -> str:
        """Add x @ weight.T to ``graph`` for ``x`` (rows, in), and return its name: (rows, out)."""

    def gather(self, numbers: NDArray[Any]) -> Array:
        """Return these rows, (n, in), like an embedding."""


class DenseWeight:
    """A weight in fp32."""

    pads_rows = False
    same_bits: SameBits = "any"

    def __init__(self, array: Array) -> None:
        self.array = array

    @property
    def shape(self) -> tuple[int, int]:
        return self.array.shape[0], self.array.shape[1]

    def product(self, graph: Graph, x: str) -> str:
        return graph.node("Gemm", x, graph.constant(self.array), transB=1)

    def gather(self, numbers: NDArray[Any]) -> Array:
        rows: Array = self.array[numbers]
        return rows


def weight_of(module: Any, precision: Precision | None = None) -> Weight:
    """Return the weight of a linear layer or an embedding, quantized or in fp32.

    ``precision`` defaults to the module's current precision. Raises `Unsupported` for other modules
    and types."""
    precision = precision or vars(module).get("precision", "exact")
    if isinstance(module, (nn.QuantizedLinear, nn.QuantizedEmbedding)):
        kind = {"group_size": module.group_size, "bits": module.bits, "mode": module.mode}
        given = (module["weight"], module["scales"], module.get("biases"))
        return quantized_weight(*given, precision, **kind)
    if not isinstance(module, (nn.Linear, nn.Embedding)) or module["weight"].dtype != mx.float32:
        raise Unsupported(f"a {type(module).__name__} is not a layer in fp32 or quantized")
    return DenseWeight(np.asarray(module["weight"]))


class Embedding:
    """The rows of an embedding, in memory or, after `read_from`, in the checkpoint files."""

    def __init__(self, module: Any) -> None:
        self.weight: Weight | None = weight_of(module, "fast")  # codes as they lie in memory
        """None if the rows are in files."""
        self._module, self._arrays = module, dict(module.parameters())
        names = ("group_size", "bits", "mode") if "scales" in module else ()
        self._kind = {name: getattr(module, name) for name in names}
        self._parts: dict[str, FileRows] = {}

    def gather(self, numbers: NDArray[Any]) -> Array:
        """Return these rows, (n, in). Raises `FilesChanged`."""
        if self.weight is not None:
            return self.weight.gather(numbers)
        rows = {name: part[numbers] for name, part in self._parts.items()}
        if not self._kind:
            return rows["weight"]
        bits, mode = self._kind["bits"], self._kind["mode"]
        if mode == "affine" and WIDER[bits] == bits:  # without MLX, which takes 0.1 ms
            codes = lying_codes(rows["weight"], rows["scales"], rows["biases"], bits)
            return codes.dense()
        arrays = {name: mx.array(array) for name, array in rows.items()}
        given = arrays["weight"], arrays["scales"], arrays.get("biases")
        return quantized_weight(*given, "fast", **self._kind).gather(np.arange(len(numbers)))

    def read_from(self, files: Sequence[Path]) -> None:
        """Drop the rows in memory, including the module's, if safetensors ``files`` have the same
        rows. They do not if the weight was converted, divided or merged."""
        arrays, self._arrays = self._arrays, {}
        parts = file_rows.find(files, arrays)
        if len(parts) == len(arrays):
            self.weight, self._parts = None, parts
            for name in parts:
                self._module.pop(name, None)


def expert_weights(module: Any, precision: Precision | None = None) -> list[Weight]:
    """Return the weight of each expert of a `SwitchLinear`, like `weight_of` for a layer."""
    precision = precision or vars(module).get("precision", "exact")
    if isinstance(module, QuantizedSwitchLinear):
        kind = {"group_size": module.group_size, "bits": module.bits, "mode": module.mode}
        given = [module.get(name) for name in ("weight", "scales", "biases", "global_scale")]
        parts = ([x if x is None else x[expert] for x in given] for expert in range(len(given[0])))
        return [
            quantized_weight(weight, scales, biases, precision, factor, **kind)
            for weight, scales, biases, factor in parts
        ]
    if not isinstance(module, SwitchLinear) or module["weight"].dtype != mx.float32:
        raise Unsupported(f"a {type(module).__name__} has no experts in fp32 or quantized")
    return [DenseWeight(array) for array in np.asarray(module["weight"])]


def quantized_weight(
    weight: mx.array,
    scales: mx.array,
    biases: mx.array | None,
    precision: Precision,
    global_scale: mx.array | None = None,
    **kind: Any,
) -> Weight:
    """Return the weight that MLX quantized: ``kind`` is its group size, bits and mode.

    Values of mxfp8 have exponents of their own and are no integer codes. They become fp32."""
    if kind["mode"] == "mxfp8":
        whole = mx.dequantize(weight, scales, biases, dtype=mx.float32, **kind)
        return DenseWeight(np.asarray(whole))
    codes = codes_of(weight, scales, biases, global_scale=global_scale, **kind)
    if precision == "exact":
        return DenseWeight(codes.dense())
    return QuantizedWeight(codes, precision)


def join(weights: Sequence[Weight]) -> Weight:
    """Return ``weights`` concatenated, for layers with the same input.

    Raises `Unsupported` if they are of different kinds."""
    if len(weights) == 1:
        return weights[0]
    first, *others = weights
    alike = [weight for weight in others if isinstance(weight, QuantizedWeight)]
    if isinstance(first, QuantizedWeight) and len(alike) == len(others):
        return first.join(*alike)
    dense = [weight.array for weight in weights if isinstance(weight, DenseWeight)]
    if len(dense) < len(weights):
        raise Unsupported("layers with one input have weights of different kinds")
    return DenseWeight(np.concatenate(dense))
