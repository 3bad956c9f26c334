"""The properties of a batched model for the scheduler."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from engine.batch.layered import num_layers
from engine.batch.ragged import RaggedBatch
from engine.cache.layout import Layout
from engine.executor.base import ExecutorSpec
from engine.executor.guessing import Guesser
from engine.scheduler.timing.chunks import MAX_TOKENS

GPU_CHUNK_TOKENS = 2048
"""mlx-lm's prefill step size. Shorter chunks leave a GPU idle between them."""
EXPERTS_CHUNK_TOKENS = 8192
"""The limit for models with experts: each chunk reads nearly all of them."""

FUSED_HEAD_DIMS = (64, 72, 80, 96, 128)
"""Sizes of heads for which Metal has a kernel that attends with many queries and stores no scores
(`ScaledDotProductAttention::use_fallback` in MLX)."""
SCORE_ARRAYS = 3
"""Arrays of scores that exist at once: masks and biases make others, and MLX dispatches a few
operations ahead."""

_EXPERTS = (SwitchLinear, QuantizedSwitchLinear)


def spec_of(
    model: Any, layout: Layout, batch_class: type[RaggedBatch], page_tokens: int, *, guesses: bool
) -> ExecutorSpec:
    """Return the properties of ``model``, which has ``layout``. Its weights need not be loaded."""
    on_gpu = mx.default_device() == mx.gpu
    has_experts = any(isinstance(module, _EXPERTS) for module in model.modules())
    chunk_tokens = GPU_CHUNK_TOKENS if on_gpu else MAX_TOKENS
    return ExecutorSpec(
        batching=batch_class.batching,
        attends_by=batch_class.attends_by,
        # On the CPU, MLX queues few operations: dispatching a step takes as long as running the
        # step before it, so looking ahead would only delay tokens by a step.
        look_ahead=on_gpu,
        batches_decodes=not batch_class.one_row_per_pass,
        batches_chunks=pads_chunks(layout, batch_class),
        max_sequences=None,
        prefix_cache=True,
        verifies_drafts=True,
        # Elsewhere, rows are padded to the longest.
        decodes_ends=not (batch_class.runs_model or layout.states or guesses),
        guesses=Guesser.NAME if guesses else "",
        keeps_kv=bool(layout.layers) or not layout.states,
        kv_bits=layout.kv_bits,
        page_tokens=page_tokens,
        token_bytes=max(1, layout.token_bytes),
        unpacked_token_bytes=batch_class.pages_class.unpacks * layout.value_bytes,
        gather_token_bytes=batch_class.gathered_layers * layout.layer_value_bytes,
        gather_rows=batch_class.gathered_rows(),
        pads_gathers=not batch_class.attends,
        state_bytes=layout.state_bytes,
        page_buffers=layout.page_buffers(page_tokens),
        state_buffers=tuple(state.state_bytes for state in layout.states),
        state_layout=tuple(f"{state.dtype} {state.shape}" for state in layout.states),
        has_experts=has_experts,
        layers=num_layers(layout),
        pass_token_bytes=activation_bytes(model),
        score_bytes=attention_score_bytes(model, layout, batch_class) if on_gpu else 0,
        max_chunk_tokens=EXPERTS_CHUNK_TOKENS if has_experts else chunk_tokens,
    )


def pads_chunks(layout: Layout, batch_class: type[RaggedBatch]) -> bool:
    """There is one state per sequence, not per position. Padding would change it."""
    return batch_class.pads_rows and not layout.states


def activation_bytes(model: Any) -> int:
    """Return an estimate of the bytes of activations per token while a pass is computed: the
    residual stream, a few arrays of its width, and an MLP's. In fp32, as on a CPU."""
    args = list(_arguments(model))
    hidden = _largest(args, "hidden_size", "d_model", "n_embd", "dim")
    inner = _largest(args, "intermediate_size", "ffn_hidden_size", "n_inner")
    experts = _largest(
        args, "num_experts_per_tok", "moe_topk", "moe_top_k", "num_experts_per_token"
    )
    inner = max(inner, experts * _largest(args, "moe_intermediate_size", "expert_ffn_hidden_size"))
    return int(mx.float32.size) * (6 * hidden + 3 * (inner or 4 * hidden))


def attention_score_bytes(model: Any, layout: Layout, batch_class: type[RaggedBatch]) -> int:
    """Return an estimate of the bytes of attention scores that one token of a chunk has for each
    position before it. Windows are short, so layers with one do not count if only their window is
    attended to."""
    is_capped = any(fields.get("attn_logit_softcapping") for fields in _arguments(model))
    sizes = [
        int(layer.dtype.size)
        for layer in layout.layers
        if layer.window is None
        and (is_capped or layer.key_dim != layer.value_dim or layer.key_dim not in FUSED_HEAD_DIMS)
    ]
    heads = _largest(list(_arguments(model)), "num_attention_heads", "n_heads", "n_head")
    kv_heads = max((layer.kv_heads for layer in layout.layers), default=0)
    return SCORE_ARRAYS * max(heads, kv_heads) * max(sizes, default=0)


def _arguments(model: Any) -> Iterator[dict[str, Any]]:
    """Yield the configuration of ``model``, and of the language model in it."""
    for args in (getattr(model, "args", None), getattr(model, "config", None)):
        fields = args if isinstance(args, dict) else getattr(args, "__dict__", {})
        yield fields
        inner = fields.get("text_config")
        yield inner if isinstance(inner, dict) else getattr(inner, "__dict__", {})


def _largest(args: list[dict[str, Any]], *names: str) -> int:
    found = [fields.get(name) for fields in args for name in names]
    return max((value for value in found if isinstance(value, int)), default=0)
