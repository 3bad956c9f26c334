"""Forecast what fits into this machine's memory for a model, before it is loaded.

The model is built from its files as in an engine, but no weight is read and nothing is computed: a
forecast takes about a second at any size. It assumes that the fastest kind of batching is proven
correct, and that there is no draft model.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mlx.utils import tree_flatten

from engine import device
from engine.cache.layout import UnsupportedLayout, probe_layout
from engine.cache.quantization import Precision
from engine.executor.base import ExecutorSpec
from engine.executor.spec import spec_of
from engine.model.context import context_length, served_context
from engine.model.errors import ModelUnavailable
from engine.model.load import LOAD_ERRORS, load_weights
from engine.plan import page_tokens
from engine.replica.adapters import places_in
from engine.replica.memory import MIN_BLOCKS, EngineMemory, MemorySizes, sizes_beside
from engine.scheduler import SchedulerConfig
from shared.settings import Settings


@dataclass(frozen=True, kw_only=True)
class MemoryForecast:
    """The predicted memory of an engine."""

    weights_bytes: int  # including those outside MLX
    memory_bytes: int  # of the engine, including weights
    room_bytes: int  # in addition to weights, for everything cached per sequence
    context_length: int  # in tokens
    spec: ExecutorSpec
    sizes: MemorySizes
    config: SchedulerConfig

    @property
    def fits(self) -> bool:
        """Whether the weights and the smallest KV cache fit. Otherwise the engine warns, and starts
        at the risk of running out of memory."""
        return self.room_bytes >= MIN_BLOCKS * self.sizes.block_bytes

    def context(self, sequences: int) -> int:
        """Return the longest context, in tokens, that so many sequences can have at once. 0 if not
        even one block fits."""
        return self.config.longest_of(sequences) if self.fits else 0


def forecast(path: Path, settings: Settings) -> MemoryForecast:
    """Return what fits beside the model in the directory ``path``. Raises `ModelUnavailable`."""
    device.prepare()
    try:
        model, config = load_weights(path, lazy=True)
        own = EngineMemory.of(settings)
        packed = device.forecast_packed_bytes(model, settings.cpu_precision, own.size_bytes)
        probed = probe_layout(model, compute=False)
    except UnsupportedLayout as error:
        raise ModelUnavailable(
            f"{error}: it is served one request at a time, without a forecast"
        ) from error
    except LOAD_ERRORS as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ModelUnavailable(f"the model in {path} cannot be loaded: {reason}") from error
    places = places_in(model, settings)
    packed += 0 if places is None else places.reserved_bytes
    batch_class = device.expected_batch_class(probed)
    precision = Precision(settings.kv_bits, settings.kv_group_size)
    layout = probed.with_precision(precision)
    context = served_context(model, context_length(config, model), settings.max_kv_size)
    spec = spec_of(model, layout, batch_class, page_tokens(settings.block_size), guesses=False)
    weights_bytes = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    return _of(weights_bytes + packed, spec, context, settings, own)


def _of(
    weights: int, spec: ExecutorSpec, context: int, settings: Settings, own: EngineMemory
) -> MemoryForecast:
    sizes = sizes_beside(weights, spec, context, settings, own)
    return MemoryForecast(
        weights_bytes=weights,
        memory_bytes=own.size_bytes,
        room_bytes=own.left_bytes(weights),
        context_length=context,
        spec=spec,
        sizes=sizes,
        config=SchedulerConfig(
            block_size=settings.block_size,
            block_bytes=sizes.block_bytes,
            limit_bytes=sizes.limit_bytes,
            gather_token_bytes=spec.gather_token_bytes,
            gather_rows=spec.gather_rows,
            pads_gathers=spec.pads_gathers,
            state_bytes=spec.state_bytes,
            keeps_kv=spec.keeps_kv,
            context_length=context,
            max_batch_size=sizes.decode_rows,
            prefill_batch_size=settings.prefill_batch_size,
            completion_batch_size=sizes.num_slots,
            namespace=b"",
        ),
    )
