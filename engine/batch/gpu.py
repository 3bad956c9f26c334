"""The batch for a GPU: MLX's graph, with costs measured on the device at startup."""

from __future__ import annotations

import time
from typing import NamedTuple

import mlx.core as mx

from engine.batch.graph import GraphBatch
from engine.cache.graph_pages import GraphPages
from engine.cache.layout import KVNode, Layout

ROWS = 4
PAGE_TOKENS = 64
LENGTHS = (32, 2048)
"""Positions of a row in the timed calls."""
QUERIES = 64
"""Queries of a row in the calls that represent chunks."""
CALLS = 8
"""Calls in one evaluation, so that the host's time to build them counts as in a step."""
TRIES = 3

CALL_COST_LIMITS = (512.0, 65_536.0)
QUERY_COST_LIMITS = (1 / 512, 1.0)
"""Plausible range: timers are coarse, and other programs use the GPU too."""


class AttentionCost(NamedTuple):
    """The cost of attention, in positions of a row with one query."""

    call_cost_tokens: float
    query_cost: float


class GPUBatch(GraphBatch):
    """Its costs are estimates; those of `measured` are not."""

    call_cost_tokens: float = 8_192
    query_cost = 1 / 8

    @classmethod
    def measured(cls, layout: Layout) -> type[GPUBatch]:
        """Return the class with the costs of attention as in a layer of ``layout`` on this device.
        A draft model has others than its target. Takes a few tens of milliseconds."""
        layer = next((n for n, each in enumerate(layout.layers) if each.value_dim), None)
        if layer is None:
            return cls
        members = {"__module__": cls.__module__, **measured_cost(layout, layer)._asdict()}
        return type(cls.__name__, (cls,), members)


def measured_cost(layout: Layout, layer: int) -> AttentionCost:
    """Return the cost of a call and of further queries, from the times of short and long calls with
    one query per row and with many."""
    its = Layout((layout.layers[layer],), (), (KVNode(0),), layout.precision)
    pages = GraphPages(its, PAGE_TOKENS, ROWS * -(-LENGTHS[1] // PAGE_TOKENS))
    short, long = (_seconds(pages, length, 1) for length in LENGTHS)
    few, many = (_seconds(pages, length, QUERIES) for length in LENGTHS)
    span = ROWS * (LENGTHS[1] - LENGTHS[0])
    position_s = max((long - short) / span, 1e-12)
    more = (many - few) / span / position_s - 1
    return AttentionCost(
        _within(short / position_s - ROWS * LENGTHS[0], CALL_COST_LIMITS),
        _within(more / (QUERIES - 1), QUERY_COST_LIMITS),
    )


def _seconds(pages: GraphPages, length: int, width: int) -> float:
    """Return the seconds of one call over ``length`` positions, the best of a few attempts."""
    (layer,) = pages.layout.layers
    query = mx.zeros((ROWS, layer.kv_heads, width, layer.key_dim), layer.dtype)
    count = -(-length // PAGE_TOKENS)
    table = mx.arange(ROWS * count, dtype=mx.uint32).reshape(ROWS, count)
    mx.eval(query, table)
    found = float("inf")
    for _ in range(TRIES + 1):  # the first call loads the kernels
        begun = time.perf_counter()
        outputs = []
        for _ in range(CALLS):
            keys, values = (each[:, :, :length] for each in pages.gather(0, table))
            outputs.append(mx.fast.scaled_dot_product_attention(query, keys, values, scale=1.0))
        mx.eval(outputs)
        found = min(found, time.perf_counter() - begun)
    return found / CALLS


def _within(value: float, limits: tuple[float, float]) -> float:
    return min(max(value, limits[0]), limits[1])
