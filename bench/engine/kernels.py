"""The size of the graph of one step on a GPU, beside that of mlx-lm's batch cache.

Graphs are built but not evaluated, so this runs on any machine. Rows get slots as from the
scheduler on a GPU. Sampling is left out on both sides."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache

from bench.primitives import count_primitives, fused_functions
from engine.batch import ragged
from engine.batch.gpu import GPUBatch
from engine.batch.ragged import Row
from engine.cache.layout import Layout, probe_layout
from engine.cache.quantization import Precision
from engine.cache.slabs import Slab, Slabs
from engine.model.load import load, resolve
from engine.scheduler.config import SchedulerConfig
from engine.scheduler.memory import Memory

ROWS = (1, 8, 32)
EVEN_TOKENS = 1500
MIXED_TOKENS = (50, 2000)
CHUNK_TOKENS = 64
BUILDS = 16
BLOCK_SIZE = 16


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
    print(f"{'':28}{'primitives a layer':>40}{'ms to build':>36}")
    heads = ["mlx-lm", "16 bits", "ratio", "8 bits", "ratio"]
    print(" " * 28 + "".join(f"{head:>8}" for head in heads * 2), flush=True)
    for width, what in ((1, "decode"), (CHUNK_TOKENS, f"chunk of {CHUNK_TOKENS}")):
        for rows in ROWS:
            for mixed in (False, True) if rows > 1 else (False,):
                lengths = mixed_lengths(rows) if mixed else [EVEN_TOKENS] * rows
                builds = [theirs(loaded, layout, lengths, width)]
                builds += [ours(loaded, layout, lengths, width, bits) for bits in (16, 8)]
                costs = measure(builds, len(layout.layers), runs)
                line = _figures([c.per_layer for c in costs])
                line += _figures([c.build_ms for c in costs], [c.build_ratio for c in costs])
                print(f"{what}, {rows} {'mixed' if mixed else 'even'}".ljust(28) + line, flush=True)


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


def ours(model: Any, layout: Layout, lengths: Sequence[int], width: int, bits: int) -> Prepare:
    """Return the step of ``width`` tokens after ``lengths`` tokens, in slabs."""
    layout = layout.with_precision(Precision(8 if bits == 8 else 16), dequantized=True)
    slabs, slots = _allocate(layout, [length + width for length in lengths])
    rows = sorted(
        Row(slot, length, length + width) for slot, length in zip(slots, lengths, strict=True)
    )
    mx.eval([(slab.arrays, slab.scales) for slab in slabs.values()])  # as in a running engine
    contents = {number: (list(slab.arrays), list(slab.scales)) for number, slab in slabs.items()}
    inputs = mx.zeros((len(rows), width), mx.int32)
    mx.eval(inputs)

    def build() -> Sequence[mx.array]:
        logits = GPUBatch(layout, slabs, rows).logits(model, inputs)
        return [logits, *(array for slab in slabs.values() for array in slab.contents)]

    def prepare() -> Build:
        for number, (arrays, scales) in contents.items():  # a write changes the array object
            slabs[number].arrays = [mx.stop_gradient(array) for array in arrays]
            slabs[number].scales = [mx.stop_gradient(array) for array in scales]
        return build

    return prepare


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
        for cache, (keys, values) in zip(caches, made, strict=True):
            cache.keys, cache.values = mx.stop_gradient(keys), mx.stop_gradient(values)
            cache.offset, cache._idx = offset, longest
        return build

    return prepare


def _allocate(layout: Layout, lengths: Sequence[int]) -> tuple[Slabs, list[Any]]:
    """Return slots for sequences of ``lengths`` tokens, and their slabs, as the scheduler would
    assign them to sequences that arrive one after the other."""
    memory = Memory(_config(layout, len(lengths)))
    slots, slabs = [], Slabs()
    for length in lengths:
        allocated = memory.allocate_slot(length)
        assert allocated is not None
        slots.append(allocated[0])
    for spec in memory.slots.slabs():
        slabs[spec.slab_id] = Slab(layout, spec.rows, spec.capacity)
    return slabs, slots


def _config(layout: Layout, rows: int) -> SchedulerConfig:
    return SchedulerConfig(
        block_size=BLOCK_SIZE,
        block_bytes=BLOCK_SIZE * layout.block_token_bytes,
        slot_block_bytes=BLOCK_SIZE * layout.slot_token_bytes,
        limit_bytes=BLOCK_SIZE * layout.slot_token_bytes * 8192 * rows,
        context_length=8192,
        max_batch_size=rows,
        prefill_batch_size=rows,
        completion_batch_size=rows,
        shares_slabs=True,
        namespace=b"",
    )


def _figures(figures: Sequence[float], ratios: Sequence[float] | None = None) -> str:
    """Return the figures of mlx-lm, and of 16 and 8 bits with their ratios to mlx-lm."""
    ratios = ratios or [each / figures[0] for each in figures]
    others = zip(figures[1:], ratios[1:], strict=True)
    return f"{figures[0]:8.1f}" + "".join(f"{each:8.1f}{ratio:8.2f}" for each, ratio in others)
