"""What the scheduler is told of a model that is computed in batches."""

from __future__ import annotations

import mlx.core as mx

from engine.batch import device
from engine.batch.ragged import RaggedBatch
from engine.cache.layout import Layout
from engine.executor.base import ExecutorSpec
from engine.executor.guessing import Guesser
from engine.scheduler.chunks import MAX_TOKENS

GPU_CHUNK_TOKENS = 2048
"""What mlx-lm computes of a prompt at once. Fewer leave a GPU idle between chunks."""


def spec_of(
    layout: Layout, batch_class: type[RaggedBatch], block_size: int, *, guesses: bool
) -> ExecutorSpec:
    """Return what the scheduler is told of a model with ``layout``. Its weights need not be
    there."""
    shares_slabs, on_gpu = device.shares_slabs(), mx.default_device() == mx.gpu
    return ExecutorSpec(
        batching=batch_class.batching,
        # On the CPU MLX queues few operations: dispatching a step takes as long as running
        # the step before it, so looking ahead would only delay tokens by a step.
        look_ahead=on_gpu,
        batches_decodes=not batch_class.one_row_per_pass,
        batches_chunks=pads_chunks(layout, batch_class),
        max_sequences=None,
        prefix_cache=True,
        verifies_drafts=True,
        guesses=Guesser.NAME if guesses else "",
        keeps_kv=bool(layout.layers) or not layout.states,
        kv_bits=layout.kv_bits,
        block_token_bytes=max(1, layout.block_token_bytes),
        slot_token_bytes=max(1, layout.slot_token_bytes + shares_slabs * layout.array_bytes),
        state_bytes=layout.state_bytes,
        block_buffers=layout.block_buffers(block_size),
        state_buffers=tuple(state.state_bytes for state in layout.states),
        state_layout=tuple(f"{state.dtype} {state.shape}" for state in layout.states),
        shares_slabs=shares_slabs,
        rings=layout.rings,
        max_chunk_tokens=min(
            GPU_CHUNK_TOKENS if on_gpu else MAX_TOKENS, layout.longest_pass or GPU_CHUNK_TOKENS
        ),
    )


def pads_chunks(layout: Layout, batch_class: type[RaggedBatch]) -> bool:
    """There is one state per sequence and not one per position. Padding would change it."""
    return batch_class.pads_rows and not layout.states
