"""Products of arrays with one weight, or with a different weight for each row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.cpu.onnx.codes import Array
from engine.cpu.onnx.graphs import Graph
from engine.cpu.onnx.weights import Weight


class Multiplier:
    """Multiplies by one weight (out, in)."""

    def __init__(self, weight: Weight) -> None:
        self.width = weight.shape[1]
        self._pads_rows = weight.pads_rows
        graph = Graph()
        x = graph.input("x", "rows", self.width)
        graph.output(weight.product(graph, x), "rows", weight.shape[0])
        self._session = graph.session()

    def __call__(self, x: Array) -> Array:
        """Return (rows, out) for ``x`` (rows, in)."""
        rows = len(x)
        if rows % 2 and self._pads_rows:
            x = np.concatenate([x, np.zeros((1, self.width), np.float32)])
        found: Array = self._session(x)[0]
        return found[:rows]


class ExpertMultiplier:
    """Multiplies each row by the weight (out, in) of its expert.

    One session holds all experts: rows are sorted by expert, and divided at the first row of each.
    """

    def __init__(self, weights: Sequence[Weight]) -> None:
        out, self.width = weights[0].shape
        self.num_experts = len(weights)
        self._pads_rows = any(weight.pads_rows for weight in weights)
        graph = Graph()
        x = graph.input("x", "rows", self.width)
        counts = graph.input("counts", self.num_experts, dtype=np.int64)
        parts = graph.nodes("Split", x, counts, outputs=self.num_experts, axis=0)
        found = [weight.product(graph, part) for weight, part in zip(weights, parts, strict=True)]
        graph.output(graph.node("Concat", *found, axis=0), "rows", out)
        self._session = graph.session()

    def __call__(self, x: Array, experts: NDArray[np.integer[Any]]) -> Array:
        """Return (rows, out) for ``x`` (rows, in) and the expert of each row."""
        counts = np.bincount(experts, minlength=self.num_experts)
        padded = counts + counts % 2 if self._pads_rows else counts
        order = np.argsort(experts, kind="stable")
        skipped = np.cumsum(padded) - padded - (np.cumsum(counts) - counts)
        places = np.empty(len(experts), np.int64)
        places[order] = np.arange(len(experts)) + skipped[experts[order]]
        sorted_rows = np.zeros((padded.sum(), self.width), np.float32)
        sorted_rows[places] = x
        found: Array = self._session(sorted_rows, padded)[0]
        return found[places]
