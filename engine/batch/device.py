"""Device-dependent choices: the classes of batches, and replacements for MLX operations that are
slow on the device."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from engine.plan import FEWEST_PAGE_TOKENS

if TYPE_CHECKING:  # not at run time: a fast BLAS has to be loaded before MLX
    from engine.batch.cpu.layers import CPUPrecision, Layers
    from engine.batch.ragged import RaggedBatch
    from engine.cache.layout import Layout
    from engine.cache.quantization import Precision

logger = logging.getLogger(__name__)

HOST_VARIABLE = "MLX_LM_SERVER_HOST_OPS"
"""Environment variable: ``0`` leaves all CPU computation to MLX."""


def prepare() -> None:
    """Replace operations of mlx-lm. Must be called before models are loaded."""
    from engine.backend import gpu_path
    from engine.backend.threads import keep_numpy_to_one_thread
    from engine.batch import ragged
    from engine.batch.cpu import gates

    gpu_path.force_if_asked()
    ragged.install()
    if uses_host():
        keep_numpy_to_one_thread()
        gates.install()


def tune(model: Any, wanted: CPUPrecision, memory_bytes: int) -> Layers | None:
    """Move layers of ``model`` out of MLX on a CPU; None if they stay.

    Layers in fp32 stay if the whole model leaves MLX, see `batch_classes`."""
    from engine.backend import graphs
    from engine.batch.cpu import decoder, layers

    if not uses_host():
        return None
    if graphs.unusable():
        logger.warning("products on the CPU will be slow: %s", graphs.unusable())
        return None
    precisions = layers.chosen_precisions(model, wanted, memory_bytes)
    return layers.Layers(model, precisions, dense=not decoder.knows(model))


def rounds_activations(model: Any) -> bool:
    """Return whether layers of ``model`` multiply activations in 8 bits, as chosen by `tune`."""
    return bool(_fast_layers(model))


@contextmanager
def exact_products(model: Any) -> Iterator[None]:
    """Inside this context, multiply the same codes by activations in fp32."""
    layers = _fast_layers(model)
    for layer in layers:
        layer.change_precision("compact")
    try:
        yield
    finally:
        for layer in layers:
            layer.change_precision("fast")


def _fast_layers(model: Any) -> list[Any]:
    layers = (module for _, module in model.named_modules())
    return [layer for layer in layers if vars(layer).get("precision") == "fast"]


def uses_host() -> bool:
    """Return whether this process computes on the CPU and may use NumPy for part of it."""
    import mlx.core as mx

    return mx.default_device() == mx.cpu and os.environ.get(HOST_VARIABLE) != "0"


def batch_classes(
    model: Any,
    layout: Layout,
    precision: Precision | None = None,
    page_tokens: int = FEWEST_PAGE_TOKENS,
) -> list[type[RaggedBatch]]:
    """Return the classes of batches for ``model`` on this device, the fastest first. Keys and
    values will be kept in ``precision``, by default that of ``layout``."""
    import mlx.core as mx

    from engine.backend import gpu_path
    from engine.batch.cpu import decoder
    from engine.batch.cpu.host import HostBatch
    from engine.batch.gpu import GPUBatch
    from engine.batch.graph import GraphBatch

    if mx.default_device() == mx.gpu:
        if gpu_path.forced:
            return [GPUBatch]
        return [
            GPUBatch.measured(layout).tried(
                model, layout, precision or layout.precision, page_tokens
            )
        ]
    if not uses_host() or any(layer.dtype != mx.float32 for layer in layout.layers):
        return [GraphBatch]
    bound = decoder.bind(model, layout)
    return [HostBatch] if bound is None else [bound, HostBatch]
