"""Layers of vision encoders on CPUs, computed by ONNX Runtime.

MLX computes everything except products on one core there. A layer is traced by MLX's own export,
and each of its primitives becomes an ONNX operator. Weights are inputs of the graph, so that
layers of a tower share a session, and nothing is copied. A class of layers with a primitive that
has no operator stays with MLX, and so does a size of image for which the first result differs from
MLX's, or no session can be made.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten

from engine.backend.threads import num_threads
from engine.cpu.onnx.graphs import Graph, Session, Unsupported
from engine.cpu.onnx.operators import add_operator

logger = logging.getLogger(__name__)

MAX_SESSIONS = max(8, min(32, 256 // num_threads()))
"""Max sessions. Each belongs to one image size and has its own threads."""
MAX_NODES = 1500
"""Max nodes of a graph. Building a larger one takes seconds, and its image size may not recur."""
MAX_LAYERS = 4096
"""Max layers that are remembered, over all image sizes."""
ALLOWED = 1e-4
"""Max difference of a session's first result from MLX's, relative to the largest element."""


class HostLayers:
    """Calls layers of towers. Used by one thread at a time."""

    def __init__(self) -> None:
        self._sessions: dict[bytes, Session | None] = {}
        """By signature, the most recently used one last; None if MLX computes the layer."""
        self._signatures: dict[tuple[int, str], bytes] = {}
        """By layer and arguments."""
        self._weights: dict[int, list[Any]] = {}
        """Weights by layer, as NumPy views."""
        self.refused: set[type] = set()
        """Classes of layers that MLX computes."""
        self.is_tracing = False
        """Whether a layer is being traced or compared: the call has to return at once."""

    @property
    def sessions(self) -> int:
        """Number of graphs: one for each kind of layer and image size."""
        return sum(session is not None for session in self._sessions.values())

    def call(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of ``layer``. Its inputs are evaluated."""
        if type(layer) not in self.refused:
            try:
                found = self._computed(layer, args, kwargs)
            except Unsupported as reason:
                self.refused.add(type(layer))
                logger.info("%s is computed by MLX: %s", type(layer).__name__, reason)
            else:
                if found is not None:
                    return found
        return layer(*args, **kwargs)

    def _computed(
        self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> mx.array | None:
        """Return the result, or None if MLX computes it. Raises: Unsupported."""
        given = args, tuple(kwargs.items())
        inputs: list[mx.array] = []
        _replace(given, lambda array: inputs.append(array) if _is_input(array) else None)
        key = id(layer), repr(_replace(given, _described))
        weights = self._weights.get(id(layer))
        if weights is None:
            weights = [_in_numpy(array) for _, array in tree_flatten(layer.parameters())]
            self._weights[id(layer)] = weights
        feeds = [*map(_in_numpy, inputs), *weights]
        signature = self._signatures.get(key)
        if signature not in self._sessions:
            self.is_tracing = True
            try:
                trace = _Trace(layer, given, inputs)
                if trace.signature not in self._sessions:
                    name = type(layer).__name__
                    made = self._made(trace, feeds, lambda: layer(*args, **kwargs), name)
                    self._add(trace.signature, made)
            finally:
                self.is_tracing = False
            if len(self._signatures) >= MAX_LAYERS:
                self._signatures.clear()
            signature = self._signatures[key] = trace.signature
        session = self._sessions[signature] = self._sessions.pop(signature)  # to the end
        return None if session is None else mx.array(session(*feeds)[0])

    def _add(self, signature: bytes, session: Session | None) -> None:
        """Store ``session``. Beyond `MAX_SESSIONS` it replaces the least recently used ones."""
        while len(self._sessions) >= MAX_SESSIONS:
            del self._sessions[next(iter(self._sessions))]
        self._sessions[signature] = session

    def _made(
        self, trace: _Trace, feeds: list[Any], compute: Callable[[], mx.array], name: str
    ) -> Session | None:
        """Create the session of a layer called ``name``, and compare its first result with that of
        ``compute``. Return None if MLX has to compute the layer. Raises: Unsupported."""
        if trace.size > MAX_NODES:
            logger.info("%s is computed by MLX at one image size: %d operators", name, trace.size)
            return None
        try:
            session = trace.session()
            found = session(*feeds)[0]
        except Unsupported:
            raise
        except Exception as error:  # of ONNX Runtime, for lack of memory or threads for instance
            logger.warning("%s is computed by MLX at one image size: %s", name, error)
            return None
        expected = np.asarray(compute())
        if not np.abs(found - expected).max() <= ALLOWED * np.abs(expected).max():
            logger.warning("%s is computed by MLX at one image size: results differ", name)
            return None
        return session


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
            found = layer(*args, **dict(kwargs))
            if not isinstance(found, mx.array):
                raise Unsupported("it does not return one array")
            return found

        try:
            mx.export_function(self._take, call, *inputs, *weights)
            self._constants = [
                (name, np.asarray(array)) for name, array in self._parts["constants"]
            ]
        except Exception as error:  # of MLX, or of code that reads values while it is traced
            raise Unsupported(f"{type(error).__name__}: {error}") from error
        finally:
            layer.update(tree_unflatten(list(zip(names, weights, strict=True))))
        if len(self._parts["outputs"]) != 1:
            raise Unsupported("it has several results")
        described = repr((self._parts["inputs"], self._parts["outputs"], self._nodes))
        values = [name.encode() + array.tobytes() for name, array in self._constants]
        self.signature = described.encode() + b"".join(values)

    def _take(self, part: dict[str, Any]) -> None:
        if part["type"] == "primitive":
            self._nodes.append(part)
        else:
            self._parts[part["type"]] = part.get(part["type"])

    @property
    def size(self) -> int:
        """The number of primitives."""
        return len(self._nodes)

    def session(self) -> Session:
        """Raises: Unsupported, and what ONNX Runtime raises."""
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
            try:
                add_operator(graph, node, values, broadcast)
            except (AssertionError, LookupError, TypeError, ValueError) as error:
                raise Unsupported(f"an operator of another form: {error!r}") from error
        ((name, shape, dtype),) = self._parts["outputs"]
        if dtype != mx.float32:
            raise Unsupported(f"its result is in {dtype}")
        graph.output(graph.node("Identity", values[name]), *shape)
        graph.drop_unused()  # of what is broadcast, most operators take the narrow form
        return graph.session()


def _replace(value: Any, each: Callable[[mx.array], Any]) -> Any:
    """Return ``value`` with each array in it, also within tuples and lists, replaced."""
    if isinstance(value, mx.array):
        return each(value)
    if type(value) in (tuple, list):
        return type(value)(_replace(one, each) for one in value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise Unsupported(f"it has an argument of {type(value).__name__}")


def _is_input(array: mx.array) -> bool:
    """Return whether ``array`` is an input of the graph. Integers are constants, because the
    model's code reads their values."""
    return bool(array.dtype in (mx.float32, mx.bool_))


def _described(array: mx.array) -> Any:
    if _is_input(array):
        return str(array.dtype), tuple(array.shape)
    if array.dtype == mx.bfloat16:
        raise Unsupported("it has arguments in bfloat16")
    return str(array.dtype), tuple(array.shape), np.asarray(array).tobytes()


def _in_numpy(array: mx.array) -> Any:
    if not _is_input(array):
        raise Unsupported(f"it has weights in {array.dtype}")
    return np.ascontiguousarray(np.asarray(array))
