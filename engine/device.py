"""The device that computes: what the rest of the engine asks about it.

On a GPU, MLX computes everything. On a CPU, most of a model is computed outside MLX, in
`engine.cpu`; this module is the only one that imports that package, so nobody has to read it to
understand the engine on a GPU. Its functions import what they call, because a fast BLAS has to be
loaded before MLX.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from engine.plan import FEWEST_PAGE_TOKENS

if TYPE_CHECKING:
    import mlx.core as mx
    from mlx import nn

    from engine.batch.ragged import RaggedBatch
    from engine.cache.layout import Layout
    from engine.cache.quantization import Precision
    from engine.cpu.texts import PackedModel
    from engine.model.encoder import Encoder
    from shared.settings import CPUPrecision

logger = logging.getLogger(__name__)

HOST_VARIABLE = "MLX_LM_SERVER_HOST_OPS"
"""Environment variable: ``0`` leaves all CPU computation to MLX."""


class OutsideLayers(Protocol):
    """The layers of a model that are computed outside MLX."""

    names: list[str]  # with their precision
    products: list[str]  # the quantized ones, with their precision, which is a setting
    nbytes: int  # of their packed weights

    def keep_packed(self) -> None:
        """Drop MLX's copies of the weights, once every path of the model's code has run."""

    def drop(self) -> None:
        """Drop all weights of these layers: the model's code will not run any more."""


class TowerLayers(Protocol):
    """Computes the layers of a vision encoder in place of MLX."""

    refused: set[type]
    """Classes of layers that MLX computes."""
    is_tracing: bool
    """Whether a layer is being traced or compared: calls within it have to return at once."""

    def call(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> mx.array:
        """Return the result of ``layer``. Its inputs are evaluated."""


def prepare() -> None:
    """Replace operations of mlx-lm. Must be called before models are loaded."""
    from engine.backend import gpu_path
    from engine.batch import ragged

    gpu_path.force_if_asked()
    ragged.install()
    if uses_host():
        from engine.backend.threads import keep_numpy_to_one_thread
        from engine.cpu import gates

        keep_numpy_to_one_thread()
        gates.install()


def uses_host() -> bool:
    """Return whether this process computes on the CPU and may use NumPy for part of it."""
    import mlx.core as mx

    return mx.default_device() == mx.cpu and os.environ.get(HOST_VARIABLE) != "0"


def host_unusable() -> str:
    """Return why ONNX Runtime cannot be used here; empty if it can."""
    from engine.cpu.onnx import graphs

    return graphs.unusable()


# -- batches of a language model ---------------------------------------------------


def batch_classes(
    model: Any,
    layout: Layout,
    precision: Precision | None = None,
    page_tokens: int = FEWEST_PAGE_TOKENS,
) -> list[type[RaggedBatch]]:
    """Return the classes of batches for ``model`` on this device, the fastest first. Keys and
    values will be kept in ``precision``, by default that of ``layout``."""
    fastest = expected_batch_class(layout)
    if fastest.pages_class.unpacks:
        from engine.cpu.decoder import decoder

        bound = decoder.bind(model, layout)
        return [fastest] if bound is None else [bound, fastest]
    from engine.backend import gpu_path
    from engine.batch.gpu import GPUBatch

    if fastest is not GPUBatch or gpu_path.forced:
        return [fastest]
    kept = precision or layout.precision
    return [GPUBatch.measured(layout).tried(model, layout, kept, page_tokens)]


def expected_batch_class(layout: Layout) -> type[RaggedBatch]:
    """Return the kind of batching that is tried first, as far as it affects memory. It needs no
    model, and measures nothing."""
    import mlx.core as mx

    if mx.default_device() == mx.gpu:
        from engine.batch.gpu import GPUBatch

        return GPUBatch
    if uses_host() and all(layer.dtype == mx.float32 for layer in layout.layers):
        from engine.cpu.attention.host_batch import HostBatch

        return HostBatch
    from engine.batch.graph import GraphBatch

    return GraphBatch


# -- layers of mlx-lm's modules ----------------------------------------------------


def move_layers(model: Any, wanted: CPUPrecision, memory_bytes: int) -> OutsideLayers | None:
    """Move layers of ``model`` out of MLX on a CPU; None if they stay.

    Layers in fp32 stay if the whole model leaves MLX, see `batch_classes`."""
    if not uses_host():
        return None
    if reason := host_unusable():
        logger.warning("products on the CPU will be slow: %s", reason)
        return None
    from engine.cpu import layers
    from engine.cpu.decoder import decoder

    precisions = layers.chosen_precisions(model, wanted, memory_bytes)
    return layers.Layers(model, precisions, dense=not decoder.knows(model))


def forecast_packed_bytes(model: Any, wanted: CPUPrecision, memory_bytes: int) -> int:
    """Convert the parts of ``model`` to the types that `move_layers` uses, and return the bytes of
    weights packed outside MLX, without reading any: the weights need not be loaded."""
    if not uses_host() or host_unusable():
        return 0
    from engine.cpu import layers

    return layers.forecast_packed_bytes(model, wanted, memory_bytes)


def rounds_activations(model: Any) -> bool:
    """Return whether layers of ``model`` multiply activations in 8 bits (`move_layers`)."""
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


# -- vision encoders, embedding and reranking models -------------------------------


def tower_layers() -> TowerLayers | None:
    """Return what computes the layers of a vision encoder with weights in fp32; None: MLX."""
    if not uses_host() or host_unusable():
        return None
    from engine.cpu.towers import HostLayers

    return HostLayers()


def packed_encoder(encoder: Encoder) -> PackedModel | None:
    """Return passes of ``encoder`` outside MLX; None if MLX computes it."""
    if not _packs_texts():
        return None
    from engine.cpu import texts

    return texts.packed_encoder(encoder)


def packed_decoder(model: Any, *, causal: bool) -> PackedModel | None:
    """Return passes of ``model``, which makes vectors or scores of texts, outside MLX; None if MLX
    computes it."""
    if not _packs_texts():
        return None
    from engine.cpu import texts

    return texts.packed_decoder(model, causal=causal)


def _packs_texts() -> bool:
    if not uses_host():
        return False
    if reason := host_unusable():
        logger.warning("MLX computes the model, which is slower: %s", reason)
        return False
    return True
