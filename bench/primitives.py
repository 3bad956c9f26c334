"""Counts the primitives of an MLX graph that was built but not evaluated.

On a GPU, each primitive that is not a view is at least one kernel. On a CPU, the functions of
`mx.fast` decompose into many primitives, so each is replaced with a single primitive while
counting."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import mlx.core as mx

VIEWS = frozenset(
    "AsStrided Broadcast BroadcastAxes ExpandDims Flatten Reshape Slice Split Squeeze "
    "StopGradient Transpose Unflatten View".split()
)
"""Primitives that launch nothing. `Reshape` copies an array whose axes were transposed; this is
ignored, because a graph does not show it."""

_NODE = re.compile(r'(\d+) \[label ="(\w+)", shape=rectangle')
_INPUT = re.compile(r"-> (\d+)\n")


def count_primitives(outputs: Sequence[mx.array]) -> Counter[str]:
    """Return the number of primitives that ``outputs`` still need, by name, without views.

    A compiled function counts as one. A concatenation copies each of its inputs with one kernel,
    and counts once per input."""
    graph = io.StringIO()
    mx.export_to_dot(graph, *outputs)
    inputs = Counter(_INPUT.findall(graph.getvalue()))
    found: Counter[str] = Counter()
    for node, name in _NODE.findall(graph.getvalue()):
        if name not in VIEWS:
            found[name] += inputs[node] if name == "Concatenate" else 1
    return found


@contextmanager
def fused_functions() -> Iterator[None]:
    """Replace each function of `mx.fast` that is a kernel on a GPU with one primitive.

    The result has the right shape but must not be evaluated: it is the first argument."""
    with ExitStack() as stack:
        for name in ("rms_norm", "layer_norm", "rope"):
            stack.enter_context(patch.object(mx.fast, name, _one_primitive))
        stack.enter_context(patch.object(mx.fast, "scaled_dot_product_attention", _attention))
        yield


def _one_primitive(x: mx.array, *arguments: Any, **named: Any) -> mx.array:
    others = [a for a in (*arguments, *named.values()) if isinstance(a, mx.array)]
    depends: Callable[..., list[mx.array]] = mx.depends
    return depends([x], others)[0]


def _attention(queries: mx.array, keys: mx.array, values: mx.array, **named: Any) -> mx.array:
    return _one_primitive(queries[..., : values.shape[-1]], keys, values, **named)
