"""The size of the graph of one step on a GPU, beside that of mlx-lm's batch cache.

Graphs are built but not evaluated, so this runs on any machine. Our steps attend by kernels, as
where a trial found them right and fast, or gather pages for MLX's attention. Sampling is left out
on both sides."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from statistics import median
from typing import Any, Literal, NamedTuple

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache

from bench.primitives import count_primitives, fused_functions
from engine.batch import ragged
from engine.batch.gpu import GPUBatch, LayerKernels, query_heads
from engine.batch.metal import kernel
from engine.batch.metal.calls import Variant, can_attend, can_round
from engine.batch.metal.kernel import Kernel, Source
from engine.batch.metal.trial import AttentionShape, KernelChoice, Timing
from engine.batch.ragged import Row
from engine.cache import page_format
from engine.cache.graph_pages import GraphPages
from engine.cache.layout import Layout, probe_layout
from engine.cache.quantization import Precision
from engine.cache.slots import Slots
from engine.model.load import load, resolve
from engine.plan import FEWEST_PAGE_TOKENS, fixed_tables

ROWS = (1, 8, 32)
EVEN_TOKENS = 1500
MIXED_TOKENS = (50, 2000)
CHUNK_TOKENS = 64
BUILDS = 16

Reads = Literal["kernels", "gathering"]
WAYS: tuple[tuple[Literal[8, 16], Reads], ...] = ((16, "kernels"), (8, "kernels"), (8, "gathering"))


class GraphCost(NamedTuple):
    """The cost of building the graph of one step."""

    per_layer: float  # primitives that are not views
    build_ms: float  # shortest CPU time
    build_ratio: float  # relative to the first measured step: the median of pairs


Build = Callable[[], Sequence[mx.array]]
"""Builds the graph of a step once, and returns the arrays that the step evaluates."""
Prepare = Callable[[], Build]
"""Brings the caches to the start of the step. Not part of a step, so not timed."""


def kernels(model: str, runs: int) -> None:
    """Print primitives a layer, and milliseconds to build the graph, of steps of 1 to 32 rows."""
    ragged.install()
    loaded = load(resolve(model)).model
    loaded.set_dtype(mx.bfloat16)  # as on a GPU
    mx.eval(loaded.parameters())
    layout = probe_layout(loaded)
    print(f"{'':24}{'primitives a layer':>50}{'ms to build':>50}")
    heads = ["mlx-lm", *(head for bits, how in WAYS for head in (f"{bits} {how[:6]}", "ratio"))]
    print(" " * 24 + "".join(f"{head:>10}" for head in heads * 2), flush=True)
    for width, what in ((1, "decode"), (CHUNK_TOKENS, f"chunk of {CHUNK_TOKENS}")):
        for rows in ROWS:
            for mixed in (False, True) if rows > 1 else (False,):
                lengths = mixed_lengths(rows) if mixed else [EVEN_TOKENS] * rows
                builds = [theirs(loaded, layout, lengths, width)]
                builds += [ours(loaded, layout, lengths, width, *way) for way in WAYS]
                costs = measure(builds, len(layout.layers), runs)
                line = _figures([c.per_layer for c in costs])
                line += _figures([c.build_ms for c in costs], [c.build_ratio for c in costs])
                print(f"{what}, {rows} {'mixed' if mixed else 'even'}".ljust(24) + line, flush=True)


def mixed_lengths(rows: int) -> list[int]:
    """Return lengths between 50 and 2,000 tokens, in a random order."""
    rng = random.Random(1)
    lengths = [*MIXED_TOKENS, *(rng.randint(*MIXED_TOKENS) for _ in range(rows - 2))]
    rng.shuffle(lengths)
    return lengths


def measure(steps: Sequence[Prepare], layers: int, runs: int) -> list[GraphCost]:
    """Count the primitives of each of ``steps``, and time building them, in turn.

    Other programs on the machine slow down consecutive builds alike, so they change ratios of
    pairs less than times. The graph is freed afterwards, because an evaluated step has none."""
    with fused_functions(), _no_garbage_collection():
        primitives = [count_primitives(prepare()()).total() for prepare in steps]
        seconds: list[list[float]] = [[] for _ in steps]
        for _ in range(BUILDS * runs):
            for prepare, times in zip(steps, seconds, strict=True):
                build = prepare()
                begun = time.thread_time()
                built = build()
                times.append(time.thread_time() - begun)
                del built
    return [
        GraphCost(
            count / layers,
            1e3 * min(times),
            median(ours / theirs for ours, theirs in zip(times, seconds[0], strict=True)),
        )
        for count, times in zip(primitives, seconds, strict=True)
    ]


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def ours(
    model: Any,
    layout: Layout,
    lengths: Sequence[int],
    width: int,
    bits: Literal[8, 16],
    reads: Reads = "kernels",
) -> Prepare:
    """Return the step of ``width`` tokens after ``lengths`` tokens, in pages."""
    page_format.compiled = page_format.as_kernel  # as on a GPU
    layout = layout.with_precision(Precision(bits))
    batch_class = _with_kernels(model, layout) if reads == "kernels" else GPUBatch
    tables = fixed_tables(len(lengths), max(lengths) + width, FEWEST_PAGE_TOKENS)
    pages = GraphPages(layout, FEWEST_PAGE_TOKENS, sum(len(table.pages) for table in tables))
    slots = Slots(pages)
    for table in tables:
        slots.change(table)
    rows = [Row(slot, length, length + width) for slot, length in enumerate(lengths)]
    inputs, contents = mx.zeros((len(rows), width), mx.int32), pages.contents
    mx.eval(inputs, contents)  # as in a running engine

    def build() -> Sequence[mx.array]:
        return [batch_class(layout, slots, rows).logits(model, inputs), *pages.contents]

    def prepare() -> Build:
        pages.arrays = [mx.stop_gradient(array) for array in contents]  # a write changes the object
        return build

    return prepare


def _with_kernels(model: Any, layout: Layout) -> type[GPUBatch]:
    """Return the class that attends by kernels wherever it can."""
    if kernel.why_not():
        kernel.make = _stand_in
    way = KernelChoice(True, True, (Timing(AttentionShape(1, 1, 1), 1.0, 0.0, Variant(4, 8, 4)),))
    found = {}
    pages = GraphPages(layout, FEWEST_PAGE_TOKENS)
    for layer, heads in query_heads(model, layout, FEWEST_PAGE_TOKENS).items():
        form = pages.formats[layer]
        if can_attend(form):
            rounds = way if can_round(form) else KernelChoice(False, True, way.timings)
            found[form.keys, form.values] = LayerKernels(heads, rounds)
    return GPUBatch._with(kernels=found)


def _stand_in(source: Source) -> Kernel:
    """Return one primitive with the inputs and outputs of a kernel, which is never evaluated."""

    def call(
        *,
        inputs: Sequence[mx.array],
        output_shapes: Sequence[tuple[int, ...]],
        output_dtypes: Sequence[mx.Dtype],
        **_: Any,
    ) -> list[mx.array]:
        outputs = [
            mx.broadcast_to(_zero(dtype), shape)
            for shape, dtype in zip(output_shapes, output_dtypes, strict=True)
        ]
        depends: Callable[..., list[mx.array]] = mx.depends
        return depends(outputs, list(inputs))

    return call


@cache
def _zero(dtype: mx.Dtype) -> mx.array:
    zero = mx.zeros((), dtype)
    mx.eval(zero)
    return zero


def theirs(model: Any, layout: Layout, lengths: Sequence[int], width: int) -> Prepare:
    """Return the step of ``width`` tokens after ``lengths`` tokens, in mlx-lm's batch caches."""
    longest = max(lengths)
    padding = [longest - length for length in lengths]
    filled = -(-(longest + width) // BatchKVCache.step) * BatchKVCache.step
    made = []
    for layer in layout.layers:
        shape = (len(lengths), layer.kv_heads, filled)
        keys = mx.zeros((*shape, layer.key_dim), layer.dtype)
        made.append((keys, mx.zeros((*shape, layer.value_dim), layer.dtype)))
    offset, inputs = mx.array(lengths), mx.zeros((len(lengths), width), mx.int32)
    mx.eval(made, offset, inputs)

    caches = [BatchKVCache(padding) for _ in made]

    def build() -> Sequence[mx.array]:
        logits: mx.array = model(inputs, cache=caches)
        return [logits, *(a for cache in caches for a in (cache.keys, cache.values, cache.offset))]

    def prepare() -> Build:
        for one, (keys, values) in zip(caches, made, strict=True):
            one.keys, one.values = mx.stop_gradient(keys), mx.stop_gradient(values)
            one.offset, one._idx = offset, longest
        return build

    return prepare


def _figures(figures: Sequence[float], ratios: Sequence[float] | None = None) -> str:
    """Return the figures of mlx-lm, and of our ways with their ratios to mlx-lm."""
    ratios = ratios or [each / figures[0] for each in figures]
    others = zip(figures[1:], ratios[1:], strict=True)
    return f"{figures[0]:10.1f}" + "".join(f"{each:10.1f}{ratio:10.2f}" for each, ratio in others)
