"""Products with quantized weights, as nodes of ONNX Runtime's graphs.

Its products take codes around a middle: 8 of 16, or 128 of 256. With zero points in floats they
fall back to a way that is 40 times slower. So a weight ``w = s q + b`` is multiplied in two
parts, which together are exact: ``s (q - middle)`` by `MatMulNBits`, and ``b + s middle`` by a
product with the sums of the activations in each group, 32 to 128 times smaller.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from engine.backend.codes import Array, Codes, joined
from engine.backend.graphs import CONTRIB, Graph

Precision = Literal["exact", "compact", "fast"]
"""``exact`` and ``compact`` multiply activations in fp32, ``fast`` rounds them to 8 bits in each
group. With activations in fp32 only codes of 4 bits are fast: ``exact`` makes codes of 8 bits
fp32, ``compact`` makes two products of them, in a quarter of the memory and twice the time."""

SameBits = Literal["any", "even", "none"]
"""The numbers of rows among which a row of a product has the same bits."""

_CHECKED_ROWS = (1, 2, 3, 4, 5, 8, 13, 16, 34, 65, 130)

ACCURACY_LEVELS: dict[Precision, int] = {"exact": 1, "compact": 1, "fast": 4}
"""Their names in MatMulNBits."""


class QuantizedWeight:
    """A quantized matrix (out, in)."""

    def __init__(self, codes: Codes, precision: Precision) -> None:
        self.codes, self.precision = codes, precision
        self.shape = codes.shape
        self._parts = [codes]
        if precision != "fast" and codes.bits == 2:
            self._parts = [codes.widened()]
        elif precision != "fast" and codes.bits == 8:
            self._parts = [*codes.halves()]

    @property
    def pads_rows(self) -> bool:
        """Whether an odd number of rows becomes even, so that each row has the same bits in both.

        In fp32 one row alone has a kernel of its own, which takes a quarter of the time of two
        rows: there it is not padded, and its result differs by rounding."""
        return self.precision == "fast" and self.same_bits == "even"

    @property
    def same_bits(self) -> SameBits:
        level = ACCURACY_LEVELS[self.precision]
        return of_all(rows_with_same_bits(p.bits, p.group_size, level) for p in self._parts)

    def product(self, graph: Graph, x: str) -> str:
        """Add the product of ``x`` (rows, in) to ``graph``; return its name (rows, out)."""
        out, width = self.shape
        total = ""
        for part in self._parts:
            found = graph.node(
                "MatMulNBits",
                x,
                graph.constant(part.packed),
                graph.constant(part.scales),
                domain=CONTRIB,
                K=width,
                N=out,
                bits=part.bits,
                block_size=part.group_size,
                accuracy_level=ACCURACY_LEVELS[self.precision],
            )
            total = graph.node("Add", total, found) if total else found
        offsets = [part.offsets + part.middle * part.scales for part in self._parts]
        rest: Array = np.sum(offsets, axis=0)
        if not rest.any():
            return total
        groups = rest.shape[1]
        split = graph.integers(-1, groups, self.codes.group_size)
        sums = graph.node(
            "ReduceSum",
            graph.node("Reshape", x, split),
            graph.integers(2),
            keepdims=0,
        )
        return graph.node("Gemm", sums, graph.constant(rest), total, transB=1)

    def gather(self, ids: NDArray[np.integer[Any]]) -> Array:
        """Return rows (ids, in)."""
        return self.codes.rows(ids).dense()

    def join(self, *others: QuantizedWeight) -> QuantizedWeight:
        """Return this and ``others`` side by side along ``out``."""
        return QuantizedWeight(
            joined([self.codes, *(other.codes for other in others)]), self.precision
        )


def of_all(kinds: Iterable[SameBits]) -> SameBits:
    """Return what holds for a computation with products of all these kinds."""
    found = set(kinds)
    return "none" if "none" in found else "even" if "even" in found else "any"


@cache
def rows_with_same_bits(bits: int, group_size: int, level: int) -> SameBits:
    """Return what this processor does with codes of this kind."""
    rng = np.random.default_rng(0)
    out, groups = 96, max(2, 256 // group_size)
    codes = Codes(
        bits,
        rng.integers(0, 256, (out, groups, group_size * bits // 8), np.uint8),
        rng.random((out, groups), np.float32),
        rng.random((out, groups), np.float32),
    )
    graph = Graph()
    x = graph.input("x", "rows", groups * group_size)
    weight = QuantizedWeight(codes, "exact" if level == ACCURACY_LEVELS["exact"] else "fast")
    graph.output(weight.product(graph, x), "rows", out)
    multiply = graph.session()
    rows = rng.standard_normal((max(_CHECKED_ROWS), groups * group_size), np.float32)
    (many,) = multiply(rows)
    differ = [n for n in _CHECKED_ROWS if not np.array_equal(multiply(rows[:n])[0], many[:n])]
    return "none" if any(n % 2 == 0 for n in differ) else "even" if differ else "any"
