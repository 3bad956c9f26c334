"""Which models suit a Mac: tables of README.md and docs/agents.md, by the engine's own account of
memory.

`model_choices.json` has the public architecture parameters of each model. mlx-lm makes the model
of them, without weights: nothing is evaluated.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from engine.batch.gpu import GPUBatch
from engine.cache.layout import Layout, probe_layout
from engine.cache.quantization import Precision
from engine.executor.spec import GPU_CHUNK_TOKENS
from engine.model.context import context_length
from engine.plan import page_tokens
from engine.replica.memory import BUFFER_CACHE_BYTES, HEADROOM_BYTES, METAL_SHARE, table_bytes
from engine.scheduler import SchedulerConfig
from shared.settings import Settings

MEMORY_GB = (8, 16, 32, 64, 128, 256, 512)
AGENT_MEMORY_GB = (16, 32, 64, 128)
KV_BITS = (16, 8, 4)
SHOWN = 3
"""The models for each size: the largest."""
AGENT_TOKENS = 16_384
"""An agent's own prompt and some work, at the least."""
CHAT_TOKENS = 8_192
SHORT_TOKENS = 10_240
"""A short conversation with an agent."""
CHAT_KV_BITS = 8  # the default
_SMALL_MAC_GB = 36
"""Below this, Metal recommends two thirds of a Mac's memory as working set, from it on three
quarters."""


class Model(NamedTuple):
    name: str
    weights: str  # their precision
    parameters: int
    weights_bytes: int
    layout: Layout
    context: int  # in tokens

    def config(self, memory_gb: int, kv_bits: int) -> SchedulerConfig | None:
        """Return what the scheduler of an engine gets, as far as memory is concerned. None if there
        is no room beside the weights."""
        settings = Settings()
        slots = settings.completion_batch_size
        layout = self.layout.with_precision(Precision(kv_bits, settings.kv_group_size))
        states_bytes = slots * layout.state_bytes
        other_bytes = self.weights_bytes + states_bytes + table_bytes(slots, self.context)
        room = room_bytes(working_set_bytes(memory_gb), other_bytes)
        page = page_tokens(settings.block_size)
        gathered = GPUBatch.gathered_layers * layout.layer_value_bytes
        if room < page * (layout.token_bytes + gathered):
            return None
        return SchedulerConfig(
            block_size=settings.block_size,
            block_bytes=settings.block_size * layout.token_bytes,
            page_tokens=page,
            gather_token_bytes=gathered,
            limit_bytes=room + states_bytes,
            state_bytes=layout.state_bytes,
            max_snapshots=settings.sequence_cache_size if layout.state_bytes else 0,
            context_length=self.context,
            max_batch_size=slots,
            prefill_batch_size=settings.prefill_batch_size,
            completion_batch_size=slots,
            namespace=bytes(16),
            look_ahead=True,
            layers=len(layout.layers),
            max_chunk_tokens=GPU_CHUNK_TOKENS,
        )

    def tokens(self, memory_gb: int, kv_bits: int) -> int:
        """Return the longest conversation that fits. Its next turn finds all of it. 0 if there is
        no room beside the weights."""
        config = self.config(memory_gb, kv_bits)
        return 0 if config is None else min(self.context, config.capacity)

    def at_once(self, memory_gb: int, kv_bits: int) -> int:
        """Return how many conversations of `SHORT_TOKENS` fit at once."""
        config = self.config(memory_gb, kv_bits)
        return 0 if config is None else config.at_once(SHORT_TOKENS)

    def shown(self, memory_gb: int, kv_bits: int) -> str:
        tokens = self.tokens(memory_gb, kv_bits)
        return f"{tokens:,}" if tokens < self.context else f"{tokens:,} (all)"

    @property
    def size(self) -> str:
        return f"{self.weights}, {self.weights_bytes / 1e9:.1f} GB"


def working_set_bytes(memory_gb: int) -> int:
    """Return what Metal recommends by default on a Mac with so much memory."""
    total = memory_gb << 30
    return total * 2 // 3 if memory_gb < _SMALL_MAC_GB else total * 3 // 4


def room_bytes(working_set: int, other_bytes: int) -> int:
    """Return what caches may take of a Mac, as `EngineMemory` has it there."""
    left = working_set - other_bytes - BUFFER_CACHE_BYTES - HEADROOM_BYTES
    return max(0, int(left * METAL_SHARE))


def models() -> Iterator[Model]:
    """Yield the models of `model_choices.json`, from the smallest to the largest."""
    choices = json.loads(Path(__file__).with_suffix(".json").read_text())
    return (_model(name, config) for name, config in choices.items())


def largest() -> Iterator[tuple[str, ...]]:
    """Yield memory, the largest model with room for a conversation of `CHAT_TOKENS`, its size and
    how much fits."""
    known = list(models())
    for memory_gb in MEMORY_GB:
        fitting = (m for m in known if m.tokens(memory_gb, CHAT_KV_BITS) >= CHAT_TOKENS)
        model = max(fitting, key=lambda m: m.weights_bytes)
        yield f"{memory_gb} GB", model.name, model.size, model.shown(memory_gb, CHAT_KV_BITS)


def agent_rows() -> Iterator[tuple[str, ...]]:
    """Yield memory, model, its size, the tokens that fit at each of `KV_BITS`, and how many short
    conversations fit at once with the default."""
    known = list(models())
    for memory_gb in AGENT_MEMORY_GB:
        fitting = [m for m in known if m.tokens(memory_gb, min(KV_BITS)) >= AGENT_TOKENS]
        for model in sorted(fitting, key=lambda m: m.weights_bytes)[-SHOWN:]:
            tokens = (model.shown(memory_gb, bits) for bits in KV_BITS)
            at_once = f"{model.at_once(memory_gb, CHAT_KV_BITS)}"
            yield f"{memory_gb} GB", model.name, model.size, *tokens, at_once


def _model(name: str, config: dict[str, Any]) -> Model:
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(config))
    model.set_dtype(mx.bfloat16)
    parameters = sum(array.size for _, array in tree_flatten(model.parameters()))
    experts_in_mxfp4 = config["model_type"] == "gpt_oss"

    def precision(path: str, layer: nn.Module) -> bool | dict[str, Any]:
        if not hasattr(layer, "to_quantized"):
            return False
        if not experts_in_mxfp4:
            return {"group_size": 64, "bits": 4}
        if "experts" in path:
            return {"group_size": 32, "bits": 4, "mode": "mxfp4"}
        return {"group_size": 64, "bits": 8}

    nn.quantize(model, class_predicate=precision)
    return Model(
        name=name,
        weights="MXFP4 and 8 bits" if experts_in_mxfp4 else "4 bits",
        parameters=parameters,
        weights_bytes=sum(array.nbytes for _, array in tree_flatten(model.parameters())),
        layout=probe_layout(model, compute=False),
        context=context_length(config),
    )
