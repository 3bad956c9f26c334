"""Layers of vision encoders on CPUs, computed by ONNX Runtime.

MLX computes everything except products on one core there. A layer is traced by MLX's own export,
and each of its primitives becomes an ONNX operator. Weights are inputs of the graph, so that
layers of a tower share a session, and nothing is copied. A layer with a primitive that has no
operator stays with MLX, and so does one whose first result differs from MLX's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten

from engine.backend.graphs import Graph, Session, Unsupported
from engine.vision.operators import add_operator

logger = logging.getLogger(__name__)

MOST_SESSIONS = 32
"""A session belongs to one size of image."""
MOST_LAYERS = 4096
"""Of all sizes."""
ALLOWED = 1e-4
"""The difference of the first result of a session from MLX's, as a part of the largest element."""


class HostLayers:
    """Calls layers of towers. Used by one thread at a time."""

    def __init__(self) -> None:
        self._sessions: dict[bytes, Session] = {}
        self._by_layer: dict[tuple[int, str], Session] = {}
        self._weights: dict[int, list[Any]] = {}
        """Of each layer, as NumPy's views."""
        self.refused: set[type] = set()
        """Classes of layers that MLX computes."""
        self.is_tracing = False
        """Whether a layer is called to be traced or compared: it has to return at once."""

    @property
    def sessions(self) -> int:
        """How many graphs there are: one for each kind of layer and size of image."""
        return len(self._sessions)

    def call(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what ``layer`` returns. Its inputs are evaluated."""
        if type(layer) not in self.refused:
            try:
                return self._computed(layer, args, kwargs)
            except Unsupported as reason:
                self.refused.add(type(layer))
                logger.info("%s is computed by MLX: %s", type(layer).__name__, reason)
        return layer(*args, **kwargs)

    def _computed(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = args, tuple(kwargs.items())
        inputs: list[mx.array] = []
        _replace(given, lambda array: inputs.append(array) if _is_input(array) else None)
        key = id(layer), repr(_replace(given, _described))
        weights = self._weights.get(id(layer))
        if weights is None:
            weights = [_in_numpy(array) for _, array in tree_flatten(layer.parameters())]
            self._weights[id(layer)] = weights
        feeds = [*map(_in_numpy, inputs), *weights]
        if (session := self._by_layer.get(key)) is not None:
            return mx.array(session(*feeds)[0])
        if len(self._by_layer) >= MOST_LAYERS or len(self._sessions) >= MOST_SESSIONS:
            self._by_layer.clear()
            self._sessions.clear()
        self.is_tracing = True
        try:
            trace = _Trace(layer, given, inputs)
            if (session := self._sessions.get(trace.signature)) is None:
                session = trace.session()
                _check(session(*feeds)[0], layer(*args, **kwargs))
                self._sessions[trace.signature] = session
        finally:
            self.is_tracing = False
        self._by_layer[key] = session
        return mx.array(session(*feeds)[0])


def _check(found: Any, computed: mx.array) -> None:
    """Raises: Unsupported, if ``found`` is not what MLX ``computed``."""
    expected = np.asarray(computed)
    if not np.abs(found - expected).max() <= ALLOWED * np.abs(expected).max():
        raise Unsupported("ONNX Runtime's result differs")


class _Trace:
    """The primitives of one call of a layer."""

    def __init__(self, layer: nn.Module, given: Any, inputs: list[mx.array]) -> None:
        """Arrays of ``given`` that are not among ``inputs`` are constants. Raises: Unsupported."""
        self._parts: dict[str, Any] = {}
        self._nodes: list[dict[str, Any]] = []
        names, weights = zip(*tree_flatten(layer.parameters()), strict=True)

        def call(*traced: mx.array) -> mx.array:
            rest = iter(traced)
            args, kwargs = _replace(given, lambda one: next(rest) if _is_input(one) else one)
            layer.update(tree_unflatten(list(zip(names, rest, strict=True))))
            return layer(*args, **dict(kwargs))

        try:
            mx.export_function(self._take, call, *inputs, *weights)
        except Exception as error:  # of MLX, or of code that reads values while it is traced
            raise Unsupported(f"{type(error).__name__}: {error}") from error
        finally:
            layer.update(tree_unflatten(list(zip(names, weights, strict=True))))
        if len(self._parts["outputs"]) != 1:
            raise Unsupported("it has several results")
        self._constants = [(name, np.asarray(array)) for name, array in self._parts["constants"]]
        described = repr((self._parts["inputs"], self._parts["outputs"], self._nodes))
        values = [name.encode() + array.tobytes() for name, array in self._constants]
        self.signature = described.encode() + b"".join(values)

    def _take(self, part: dict[str, Any]) -> None:
        if part["type"] == "primitive":
            self._nodes.append(part)
        else:
            self._parts[part["type"]] = part.get(part["type"])

    def session(self) -> Session:
        """Raises: Unsupported."""
        graph = Graph()
        values = {
            name: graph.constant(array.astype(np.int64) if array.dtype.kind in "iu" else array)
            for name, array in self._constants
        }
        for name, shape, dtype in self._parts["inputs"]:
            kind = np.bool_ if dtype == mx.bool_ else np.float32
            values[name] = graph.input(name, *shape, dtype=kind)
        broadcast: dict[str, str] = {}
        for node in self._nodes:
            add_operator(graph, node, values, broadcast)
        ((name, shape, dtype),) = self._parts["outputs"]
        if dtype != mx.float32:
            raise Unsupported(f"its result is in {dtype}")
        graph.output(graph.node("Identity", values[name]), *shape)
        try:
            return graph.session()
        except Exception as error:  # of ONNX Runtime
            raise Unsupported(str(error)) from error


def _replace(value: Any, each: Callable[[mx.array], Any]) -> Any:
    """Return ``value`` with each array in it, also within tuples and lists, replaced."""
    if isinstance(value, mx.array):
        return each(value)
    if isinstance(value, tuple | list):
        return type(value)(_replace(one, each) for one in value)
    return value


def _is_input(array: mx.array) -> bool:
    """Return whether ``array`` is an input of the graph. Code reads values of integers."""
    return bool(array.dtype in (mx.float32, mx.bool_))


def _described(array: mx.array) -> Any:
    if _is_input(array):
        return str(array.dtype), tuple(array.shape)
    return str(array.dtype), tuple(array.shape), np.asarray(array).tobytes()


def _in_numpy(array: mx.array) -> Any:
    if not _is_input(array):
        raise Unsupported(f"it has weights in {array.dtype}")
    return np.ascontiguousarray(np.asarray(array))
