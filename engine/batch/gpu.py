"""The batch for a GPU: MLX's graph, with costs measured on the device at startup, and kernels where
a trial finds them right and fast."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

import mlx.core as mx

from engine.batch.graph import GraphBatch, Reach
from engine.batch.metal import kernel
from engine.batch.metal.calls import (
    PageKernels,
    Spans,
    Variant,
    can_attend,
    padded_ints,
    page_kernels,
    page_table,
)
from engine.batch.metal.records import way_of
from engine.batch.metal.trial import KernelChoice
from engine.batch.ragged import Row
from engine.cache.graph_pages import GraphPages
from engine.cache.layout import ArrayLayout, KVNode, Layout
from engine.cache.page_format import PageFormat, pages_of_heads
from engine.cache.quantization import UNQUANTIZED, Precision
from engine.cache.slots import Slots
from engine.plan import FEWEST_PAGE_TOKENS, Table

logger = logging.getLogger(__name__)

ROWS = 4
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


class LayerKernels(NamedTuple):
    """The work of kernels for layers of one kind."""

    query_heads: int
    way: KernelChoice


class GPUBatch(GraphBatch):
    """A batch with estimated costs and without kernels; `measured` and `tried` make others."""

    call_cost_tokens: float = 8_192
    query_cost = 1 / 8

    kernels: Mapping[tuple[ArrayLayout, ArrayLayout], LayerKernels] = MappingProxyType({})
    """By the keys and values of a layer."""

    def __init__(self, layout: Layout, slots: Slots, rows: Sequence[Row]) -> None:
        super().__init__(layout, slots, rows)
        self._of_form: dict[int, tuple[PageKernels, LayerKernels] | None] = {}
        self._variants: dict[tuple[int, int | None], Variant | None] = {}
        self._gathering: dict[int, tuple[mx.array, mx.array]] = {}

    @classmethod
    def measured(cls, layout: Layout) -> type[GPUBatch]:
        """Return the class with the costs of attention as in a layer of ``layout`` on this device.
        A draft model has others than its target. Takes a few tens of milliseconds."""
        layer = next((n for n, each in enumerate(layout.layers) if each.value_dim), None)
        return cls if layer is None else cls._with(**measured_cost(layout, layer)._asdict())

    @classmethod
    def tried(
        cls, model: Any, layout: Layout, precision: Precision, page_tokens: int
    ) -> type[GPUBatch]:
        """Return the class with the kernels that are right and not slower on this device, for
        ``layout`` without quantization and with ``precision``. Takes seconds, unless the result is
        remembered."""
        if why := kernel.why_not():
            return cls._with(attends_by=f"gathering ({why})")
        found: dict[tuple[ArrayLayout, ArrayLayout], LayerKernels] = {}
        heads = query_heads(model, layout, page_tokens)
        for each in (layout.with_precision(UNQUANTIZED), layout.with_precision(precision)):
            for layer, count in heads.items():
                kinds = each.arrays[2 * layer], each.arrays[2 * layer + 1]
                form = PageFormat(*kinds, page_tokens)
                if kinds not in found and can_attend(form):
                    found[kinds] = LayerKernels(count, way_of(form, count))
        return cls._with(kernels=found, attends_by=_named([each.way for each in found.values()]))

    @classmethod
    def _with(cls, **members: Any) -> type[GPUBatch]:
        return type(cls.__name__, (cls,), {"__module__": cls.__module__, **members})

    def attend(
        self, layer: int, query: mx.array, scale: float, window: int | None, sinks: mx.array | None
    ) -> mx.array:
        own = self._own(self._pages.formats[layer])
        if own is not None and own[1].query_heads == query.shape[1]:
            key = id(own[0]), window
            if key not in self._variants:
                self._variants[key] = self._variant(own[1].way, window)
            variant = self._variants[key]
            if variant is not None and query.dtype == self.layout.layers[layer].dtype:
                pool, rows = self._pages.arrays[layer], self._spans
                return own[0].attend(pool, query, rows, scale, window, sinks, variant)
        return super().attend(layer, query, scale, window, sinks)

    def _words(self, form: PageFormat, keys: mx.array, values: mx.array) -> mx.array:
        own = self._own(form)
        same = keys.dtype == values.dtype == form.keys.dtype
        if own is not None and own[1].way.rounds and same:
            return own[0].round(keys, values)
        return super()._words(form, keys, values)

    def _gathered(self, layer: int, reach: Reach) -> tuple[mx.array, mx.array]:
        own = self._own(self._pages.formats[layer])
        if own is None or not own[1].way.gathers:
            return super()._gathered(layer, reach)
        given = self._gathering.get(id(reach))
        if given is None:
            given = self._gathering[id(reach)] = page_table(reach.pages), padded_ints(reach.ends)
        count = reach.end - reach.first
        return own[0].gather(self._pages.arrays[layer], *given, reach.first, count)

    def _own(self, form: PageFormat) -> tuple[PageKernels, LayerKernels] | None:
        if id(form) not in self._of_form:
            found = self.kernels.get((form.keys, form.values))
            self._of_form[id(form)] = None if found is None else (page_kernels(form), found)
        return self._of_form[id(form)]

    def _variant(self, way: KernelChoice, window: int | None) -> Variant | None:
        if self.given is not None and self.given.spans:
            return None
        longest = self._spans.longest
        seen = longest if window is None else min(window, longest)
        return way.variant(seen, len(self.rows), self.width)

    @cached_property
    def _spans(self) -> Spans:
        return Spans.of([(row.start, row.end) for row in self.rows], self.tables)


class _Recorder(GraphBatch):
    """Records how many heads of queries attend to a layer."""

    def __init__(self, layout: Layout, slots: Slots, rows: Sequence[Row]) -> None:
        super().__init__(layout, slots, rows)
        self.heads: dict[int, int] = {}

    def write(self, layer: int, keys: mx.array, values: mx.array) -> None:
        return

    def attend(
        self, layer: int, query: mx.array, scale: float, window: int | None, sinks: mx.array | None
    ) -> mx.array:
        self.heads.setdefault(layer, query.shape[1])
        dim = self.layout.layers[layer].value_dim
        return mx.zeros((*query.shape[:3], dim), query.dtype)


def query_heads(model: Any, layout: Layout, page_tokens: int) -> dict[int, int]:
    """Return the number of heads of queries of each layer; nothing if the model attends by
    itself."""
    slots = Slots(GraphPages(layout, page_tokens, 1))
    slots.change(Table(0, 0, (0,)))
    batch = _Recorder(layout, slots, [Row(0, 0, 1)])
    try:
        model(mx.zeros((1, 1), mx.int32), cache=batch.views)  # a graph that nobody evaluates
    except Exception as error:  # whatever a model's own code raises
        logger.info("no kernels for a model that computes attention by itself: %s", error)
        return {}
    return batch.heads


def _named(ways: Sequence[KernelChoice]) -> str:
    """Return how attention reads pages, for people."""
    if any(way.attends for way in ways):
        return "kernels" if all(way.attends for way in ways) else "kernels and gathering"
    reasons = [way.reason for way in ways if way.reason]
    return f"gathering ({reasons[0]})" if reasons else "gathering"


def measured_cost(layout: Layout, layer: int) -> AttentionCost:
    """Return the cost of a call and of further queries, from the times of short and long calls with
    one query per row and with many."""
    its = Layout((layout.layers[layer],), (), (KVNode(0),), layout.precision)
    pages = GraphPages(its, FEWEST_PAGE_TOKENS, ROWS * -(-LENGTHS[1] // FEWEST_PAGE_TOKENS))
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
    count = -(-length // FEWEST_PAGE_TOKENS)
    table = mx.arange(ROWS * count, dtype=mx.uint32).reshape(ROWS, count)
    where = pages_of_heads(table, layer.kv_heads)
    mx.eval(query, where)
    found = float("inf")
    for _ in range(TRIES + 1):  # the first call loads the kernels
        begun = time.perf_counter()
        outputs = []
        for _ in range(CALLS):
            keys, values = (each[:, :, :length] for each in pages.gather(0, where))
            outputs.append(mx.fast.scaled_dot_product_attention(query, keys, values, scale=1.0))
        mx.eval(outputs)
        found = min(found, time.perf_counter() - begun)
    return found / CALLS


def _within(value: float, limits: tuple[float, float]) -> float:
    return min(max(value, limits[0]), limits[1])
