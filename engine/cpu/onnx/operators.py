"""Primitives of MLX, as its export describes them, as ONNX operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

from engine.cpu.onnx.graphs import Graph, Unsupported

_BINARY = {
    "Add": "Add", "Subtract": "Sub", "Multiply": "Mul", "Divide": "Div",
    "Maximum": "Max", "Minimum": "Min", "Power": "Pow",
}  # fmt: skip
_UNARY = {
    "Negative": "Neg", "Sigmoid": "Sigmoid", "Tanh": "Tanh", "Erf": "Erf", "Exp": "Exp",
    "Sin": "Sin", "Cos": "Cos", "Abs": "Abs",
}  # fmt: skip
_RESHAPES = ("Reshape", "ExpandDims", "Squeeze", "Flatten", "Unflatten")
_REDUCES = {2: "ReduceSum", 4: "ReduceMin", 5: "ReduceMax"}
"""By the number of the kind in MLX."""

Values = dict[str, str]
"""Names in the graph of the values of a trace."""


class _Node:
    """One primitive."""

    def __init__(
        self, graph: Graph, described: dict[str, Any], values: Values, broadcast: Values
    ) -> None:
        self.graph, self._values, self._broadcast = graph, values, broadcast
        self.name: str = described["name"]
        self.arguments: list[Any] = described["arguments"]
        self._inputs, self.outputs = described["inputs"], described["outputs"]
        self.shape = tuple(self.outputs[0][1])

    def input(self, number: int) -> str:
        return self._values[self._inputs[number][0]]

    def shape_of(self, number: int) -> tuple[int, ...]:
        return tuple(self._inputs[number][1])

    def narrow(self, number: int) -> str:
        """Return an input before it was broadcast."""
        return self._broadcast.get(self.input(number), self.input(number))

    @property
    def count(self) -> int:
        return len(self._inputs)

    def integers(self, numbers: Any) -> str:
        return self.graph.integers(*map(int, numbers))

    def node(self, op: str, *inputs: str, **attributes: Any) -> str:
        return self.graph.node(op, *inputs, **attributes)

    def reshaped(self, value: str, shape: Any) -> str:
        return self.node("Reshape", value, self.integers(shape), allowzero=1)


def add_operator(
    graph: Graph, described: dict[str, Any], values: Values, broadcast: Values
) -> None:
    """Add one primitive, and its results to ``values``. ``broadcast`` maps broadcast values to
    their originals, by name in the graph: most operators broadcast by themselves.

    Raises: Unsupported."""
    node = _Node(graph, described, values, broadcast)
    if node.name == "Split":
        found = _split(node)
    elif node.name in _BINARY:
        found = [_binary(node)]
    elif node.name in _UNARY:
        found = [node.node(_UNARY[node.name], node.input(0))]
    elif node.name in _RESHAPES:
        found = [node.reshaped(node.input(0), node.shape)]
    elif node.name in _OTHERS:
        found = [_OTHERS[node.name](node)]
    else:
        raise Unsupported(f"no operator for {node.name}")
    values.update(zip((name for name, *_ in node.outputs), found, strict=True))
    if node.name == "Broadcast":
        broadcast[found[0]] = node.input(0)


def _binary(node: _Node) -> str:
    shapes = [node.shape_of(0), node.shape_of(1)]
    narrow = [node.narrow(0), node.narrow(1)]
    whole = [node.input(0), node.input(1)]
    assert shapes[0] == shapes[1], "MLX broadcasts before"
    if narrow[0] == whole[0] or narrow[1] == whole[1]:  # one has the shape of the result
        return node.node(_BINARY[node.name], *narrow)
    return node.node(_BINARY[node.name], *whole)


def _split(node: _Node) -> list[str]:
    _, axis = node.arguments
    sizes = node.integers(shape[axis] for _, shape, _ in node.outputs)
    return node.graph.nodes(
        "Split", node.input(0), sizes, outputs=len(node.outputs), axis=int(axis)
    )


def _broadcast(node: _Node) -> str:
    return node.node("Expand", node.input(0), node.integers(node.shape))


def _square(node: _Node) -> str:
    return node.node("Mul", node.input(0), node.input(0))


def _sqrt(node: _Node) -> str:
    root = node.node("Sqrt", node.input(0))
    return node.node("Reciprocal", root) if node.arguments[0] else root


def _reduce(node: _Node) -> str:
    kind, axes = node.arguments
    if int(kind) not in _REDUCES:
        raise Unsupported(f"no operator for reductions of kind {kind}")
    return node.node(_REDUCES[int(kind)], node.input(0), node.integers(axes), keepdims=1)


def _transpose(node: _Node) -> str:
    return node.node("Transpose", node.input(0), perm=[int(axis) for axis in node.arguments[0]])


def _slice(node: _Node) -> str:
    starts, ends, strides = node.arguments
    axes = node.integers(range(len(starts)))
    parts = [node.integers(part) for part in (starts, ends)]
    return node.node("Slice", node.input(0), *parts, axes, node.integers(strides))


def _concatenate(node: _Node) -> str:
    inputs = [node.input(number) for number in range(node.count)]
    return node.node("Concat", *inputs, axis=int(node.arguments[0]))


def _softmax(node: _Node) -> str:
    return node.node("Softmax", node.input(0), axis=-1)


def _matmul(node: _Node) -> str:
    return node.node("MatMul", node.input(0), node.input(1))


def _add_product(node: _Node) -> str:
    """The third input is added to the product of the first two."""
    if [float(factor) for factor in node.arguments] != [1.0, 1.0]:
        raise Unsupported("a product with factors")
    product = node.node("MatMul", node.input(0), node.input(1))
    return node.node("Add", product, node.narrow(2))


def _gather(node: _Node) -> str:
    axes, sizes = node.arguments
    expected = list(node.shape_of(0))
    if len(axes) != 1 or node.count != 2:
        raise Unsupported("an index of several axes")
    axis = int(axes[0])
    expected[axis] = 1
    if list(sizes) != expected or (axis and node.shape_of(1)):
        raise Unsupported("an index of parts")
    found = node.node("Gather", node.input(0), node.input(1), axis=axis)
    return node.reshaped(found, node.shape)


def _pad(node: _Node) -> str:
    axes, before, after = ([int(number) for number in part] for part in node.arguments)
    pads = [0] * 2 * len(node.shape)
    for axis, low, high in zip(axes, before, after, strict=True):
        pads[axis], pads[axis + len(node.shape)] = low, high
    return node.node("Pad", node.input(0), node.integers(pads), node.input(1))


def _select(node: _Node) -> str:
    return node.node("Where", *map(node.input, range(3)))


def _cast(node: _Node) -> str:
    from onnx import helper

    if node.arguments[0] != mx.float32:
        raise Unsupported(f"a conversion to {node.arguments[0]}")
    return node.node("Cast", node.input(0), to=helper.np_dtype_to_tensor_dtype(np.dtype("float32")))


_OTHERS: dict[str, Callable[[_Node], str]] = {
    "Broadcast": _broadcast,
    "Square": _square,
    "Sqrt": _sqrt,
    "Reduce": _reduce,
    "Transpose": _transpose,
    "Slice": _slice,
    "Concatenate": _concatenate,
    "Softmax": _softmax,
    "Matmul": _matmul,
    "AddMM": _add_product,
    "Gather": _gather,
    "Pad": _pad,
    "Select": _select,
    "AsType": _cast,
}
