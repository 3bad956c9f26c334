"""Whole models whose pages are written and read by emulated kernels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import mlx_lm
import pytest

from engine import device
from engine.batch.gpu import GPUBatch, LayerKernels, query_heads
from engine.batch.metal.calls import Variant, can_attend, can_round
from engine.batch.metal.trial import AttentionShape, KernelChoice, Timing
from engine.cache.layout import Layout, probe_layout
from engine.cache.page_format import PageFormat
from engine.cache.quantization import Precision
from engine.executor.batched import BatchedExecutor
from tests.engine.batch.metal.emulate import Emulated
from tests.engine.cache.test_quantized_kv import distance
from tests.tiny_models import Kind
from zoo.examine import TOLERANCE

PAGE = 16


def with_kernels(layout: Layout, heads: int, variant: Variant) -> type[GPUBatch]:
    """Return the class that uses kernels in all cases."""
    timings = tuple(
        Timing(AttentionShape(1, 1, queries), 1.0, 0.0, variant) for queries in (1, 4, 16)
    )
    kernels = {}
    for keys, values in zip(layout.arrays[::2], layout.arrays[1::2], strict=True):
        form = PageFormat(keys, values, PAGE)
        assert can_attend(form)
        kernels[keys, values] = LayerKernels(heads, KernelChoice(can_round(form), True, timings))
    return GPUBatch._with(kernels=kernels)


@pytest.mark.parametrize(("kind", "bits"), [("llama", 8), ("gpt_oss", 8), ("gemma3", 16)])
def test_a_model_over_kernels_gives_mlx_lms_logits(
    tiny_model: Callable[..., Path], emulated: dict[str, Emulated], kind: Kind, bits: int
) -> None:
    """In plans like a scheduler's: uneven prompts in chunks, drafts, windows, sinks, shared
    pages."""
    device.prepare()
    model = mlx_lm.load(str(tiny_model(kind)))[0]
    layout = probe_layout(model).with_precision(Precision(bits))
    (heads,) = set(query_heads(model, layout, PAGE).values())
    batch_class = with_kernels(layout, heads, Variant(2, 4, 1))
    assert distance(BatchedExecutor(model, layout, PAGE, batch_class), model) < TOLERANCE
    used = {name: each.calls for name, each in emulated.items()}
    assert used["paged_attend"] > 50 and used["paged_gather"] > 4
    assert ("paged_round" in used) == (bits == 8)
