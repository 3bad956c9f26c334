"""Products with quantized weights, as nodes of ONNX Runtime's graphs.

Its products expect codes around a middle: 8 of 16, or 128 of 256. With floating-point zero points
they use a fallback that is 40 times slower. A weight ``w = s q + b`` is therefore multiplied in two
parts, which are exact together: ``s (q - middle)`` by `MatMulNBits`, and ``b + s middle`` by a
product with the sums of the activations in each group, which is 32 to 128 times smaller.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from engine.cpu.onnx.codes import Array, Codes, joined
from engine.cpu.onnx.graphs import CONTRIB, Graph, Session

Precision = Literal["exact", "compact", "fast"]
"""``exact`` and ``compact`` multiply activations in fp32, ``fast`` rounds them to 8 bits in each
group. ``exact`` converts the codes to fp32 once. ``compact`` keeps codes, which each product
converts to fp32: 4 bits in an eighth of the memory, 8 bits as two 4-bit products in a quarter."""

SameBits = Literal["any", "even", "none"]
"""The numbers of rows for which a row of a product has the same bits."""

_CHECKED_ROWS = (1, 2, 3, 4, 5, 8, 13, 16, 34, 65, 129, 130)
"""MatMulNBits divides rows into blocks of 128 for its threads: with 129 rows, one row is alone."""

CodesPrecision = Literal["compact", "fast"]
"""The precisions that keep weights as codes."""
ACCURACY_LEVELS: dict[CodesPrecision, int] = {"compact": 1, "fast": 4}
"""Their names in MatMulNBits."""


class QuantizedWeight:
    """A quantized matrix (out, in)."""

    def __init__(self, codes: Codes, precision: CodesPrecision) -> None:
        self.codes, self.precision = codes, precision
        self.shape = codes.shape
        self._parts = [codes]
        if precision != "fast" and codes.bits == 2:
            self._parts = [codes.widened()]
        elif precision != "fast" and codes.bits == 8:
            self._parts = [*codes.halves()]

    @property
    def pads_rows(self) -> bool:
        """Whether an odd number of rows is padded to even, so that each row has the same bits in
        both.

        With activations in fp32, a single row has its own kernel, which takes half the time of two
        rows: it is not padded, and its result differs by rounding."""
        return self.precision == "fast" and self.same_bits == "even"

    @property
    def same_bits(self) -> SameBits:
        level = ACCURACY_LEVELS[self.precision]
        return of_all(rows_with_same_bits(p.bits, p.group_size, level) for p in self._parts)

    def product(self, graph: Graph, x: str) -> str:
        """Add the product of ``x`` (rows, in) to ``graph``; return its name (rows, out)."""
        level = ACCURACY_LEVELS[self.precision]
        total = ""
        for part in self._parts:
            packed = packs_scales(part.bits, part.group_size, level)
            found = _around_middle(graph, x, part, level, packed=packed)
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
        """Return this matrix and ``others`` concatenated along ``out``."""
        return QuantizedWeight(
            joined([self.codes, *(other.codes for other in others)]), self.precision
        )


def _around_middle(graph: Graph, x: str, codes: Codes, level: int, *, packed: bool) -> str:
    """Add the product of ``x`` with the codes' distances from their middle, times the scales. With
    ``packed``, the scales are dropped once the session is created."""
    out, width = codes.shape
    return graph.node(
        "MatMulNBits",
        x,
        graph.constant(codes.packed),
        graph.constant(codes.scales, packed=packed),
        domain=CONTRIB,
        K=width,
        N=out,
        bits=codes.bits,
        block_size=codes.group_size,
        accuracy_level=level,
    )


def of_all(kinds: Iterable[SameBits]) -> SameBits:
    """Return the properties of a computation with products of all these kinds."""
    found = set(kinds)
    return "none" if "none" in found else "even" if "even" in found else "any"


@cache
def rows_with_same_bits(bits: int, group_size: int, level: int) -> SameBits:
    """Return the properties of products with this kind of codes on this processor."""
    codes = _tried(bits, group_size)
    graph = Graph()
    x = graph.input("x", "rows", codes.shape[1])
    weight = QuantizedWeight(codes, "compact" if level == ACCURACY_LEVELS["compact"] else "fast")
    graph.output(weight.product(graph, x), "rows", codes.shape[0])
    multiply, rows = graph.session(), _rows(codes)
    (many,) = multiply(rows)
    differ = [n for n in _CHECKED_ROWS if not np.array_equal(multiply(rows[:n])[0], many[:n])]
    return "none" if any(n % 2 == 0 for n in differ) else "even" if differ else "any"


@cache
def packs_scales(bits: int, group_size: int, level: int) -> bool:
    """Return whether products with this kind of codes never read the original scales after packing
    them. ONNX Runtime keeps both."""
    codes = _tried(bits, group_size)
    rows = _rows(codes)

    def session(scales: Array) -> Session:
        graph = Graph()
        x = graph.input("x", "rows", rows.shape[1])
        given = Codes(bits, codes.packed, scales, codes.offsets)
        graph.output(_around_middle(graph, x, given, level, packed=True), "rows", len(scales))
        return graph.session()

    multiply = session(codes.scales)
    found = [multiply(rows[:n])[0] for n in _CHECKED_ROWS]
    session(np.full_like(codes.scales, np.nan))  # replaces the first one's scales
    pairs = zip(_CHECKED_ROWS, found, strict=True)
    return all(np.array_equal(multiply(rows[:n])[0], before) for n, before in pairs)


def _tried(bits: int, group_size: int) -> Codes:
    """Return codes for testing a kind of product."""
    rng = np.random.default_rng(0)
    out, groups = 96, max(4, 256 // group_size)
    return Codes(
        bits,
        rng.integers(0, 256, (out, groups, group_size * bits // 8), np.uint8),
        rng.random((out, groups), np.float32),
        rng.random((out, groups), np.float32),
    )


def _rows(codes: Codes) -> Array:
    rng = np.random.default_rng(1)
    return rng.standard_normal((max(_CHECKED_ROWS), codes.shape[1]), np.float32)
