"""What differs by device: which batches the executor makes, and what replaces MLX's own
operations where those are slow."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # not at run time: a fast BLAS has to be loaded before MLX
    from engine.batch.ragged import RaggedBatch
    from engine.cache.layout import Layout

HOST_VARIABLE = "MLX_LM_SERVER_HOST_OPS"
"""Environment variable: ``0`` leaves everything on the CPU to MLX."""


def prepare() -> None:
    """Puts our operations in the place of mlx-lm's. To be called before models are loaded."""
    from engine.backend.threads import keep_numpy_to_one_thread
    from engine.batch import ragged
    from engine.batch.cpu import gates

    ragged.install()
    if uses_host():
        keep_numpy_to_one_thread()
        gates.install()


def tune(model: Any) -> None:
    """Fits our operations to ``model``, which has been loaded, and to this machine."""
    from engine.batch.cpu.matmuls import Matmuls, install

    if uses_host():
        matmuls = Matmuls()
        matmuls.measure(model)
        install(matmuls)


def uses_host() -> bool:
    """Whether this process computes on the CPU, and NumPy may do its part of it."""
    import mlx.core as mx

    return mx.default_device() == mx.cpu and os.environ.get(HOST_VARIABLE) != "0"


def slots_dequantized() -> bool:
    """Whether slots keep what quantized values stand for, as attention reads it, and not the
    codes: on the CPU attention to codes takes several times as long."""
    import mlx.core as mx

    return bool(mx.default_device() == mx.cpu)


def batch_classes(model: Any, layout: Layout) -> list[type[RaggedBatch]]:
    """The kinds of batch for ``model`` with ``layout`` on this device, the fastest first."""
    import mlx.core as mx

    from engine.batch.cpu import decoder
    from engine.batch.cpu.host import HostBatch
    from engine.batch.graph import GraphBatch

    if not uses_host() or any(layer.dtype != mx.float32 for layer in layout.layers):
        return [GraphBatch]
    bound = decoder.bind(model, layout)
    return [HostBatch] if bound is None else [bound, HostBatch]
