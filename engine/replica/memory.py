"""The memory available to the KV cache: pages of running sequences and of prefixes."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import mlx.core as mx
from mlx.utils import tree_flatten

from engine.executor.base import ExecutorSpec
from engine.model.load import LoadedModel
from shared.machine_memory import usable_bytes
from shared.settings import Settings

logger = logging.getLogger(__name__)

MIN_BLOCKS = 2048
"""As many blocks are used by default even if their share of the memory is less, if they fit."""
FEWEST_BLOCKS = 256
"""So many are used even if they do not fit."""
HEADROOM_BYTES = 1 << 30
"""Reserved for a step's temporary arrays. MLX dispatches ten command buffers ahead of a GPU, each
with arrays of about 50 million elements. On a CPU it also has what is kept for reuse: 512 MB of
unpacked rows, and 64 MB into which rows are read."""
METAL_SHARE = 0.6
GPU_SHARE = 0.9
HOST_SHARE = 0.4
"""Fractions of the memory left by the weights. A GPU's own memory is exclusively ours, a machine's
is shared. Metal's recommended working set is most of the memory of a Mac, on which people may also
work."""
ROW_TOKENS = 4096
"""Memory in tokens for each row by which the number of rows on a GPU is chosen."""
MAX_ROWS = 32
"""Max rows that are chosen. mlx_lm.server decodes as many."""
BUFFER_CACHE_BYTES = 512 << 20
"""Freed buffers that MLX keeps for reuse."""


@dataclass(frozen=True, kw_only=True)
class MemorySizes:
    """The sizes of one replica's KV cache and recurrent state."""

    block_bytes: int  # one block, in all layers
    num_slots: int  # max sequences that hold a slot at once
    decode_rows: int  # max sequences that decode at once
    num_blocks: int  # that fit; if the model has no KV, those of all slots at full length
    max_snapshots: int  # of recurrent state, in addition to the slots' own
    kv_bytes: int  # all pages
    limit_bytes: int  # the limit of the ledger: KV and recurrent state


def size_memory(
    spec: ExecutorSpec,
    loaded: LoadedModel,
    settings: Settings,
    packed_bytes: int = 0,
    own: EngineMemory | None = None,
) -> MemorySizes:
    """Return the sizes that fit into ``own`` memory, or that ``settings`` require.

    ``packed_bytes`` are weights outside the model's parameters, and a draft model."""
    own = own or EngineMemory.of(settings)
    return sizes_beside(
        weights_bytes(loaded) + packed_bytes, spec, loaded.context_length, settings, own
    )


def weights_bytes(loaded: LoadedModel) -> int:
    """Return the bytes of the model's own weights."""
    return sum(array.nbytes for _, array in tree_flatten(loaded.model.parameters()))


def sizes_beside(
    weights_bytes: int,
    spec: ExecutorSpec,
    context_length: int,
    settings: Settings,
    own: EngineMemory,
) -> MemorySizes:
    """Return the sizes that fit into ``own`` memory with that many bytes of weights."""
    block_bytes = spec.token_bytes * settings.block_size
    num_slots = spec.max_sequences or settings.completion_batch_size
    # A sequence that is alone has its state, and two snapshots for the next turn.
    slot_states_bytes = max(num_slots, 3) * spec.state_bytes
    tables_bytes = table_bytes(
        num_slots, _longest(weights_bytes + slot_states_bytes, spec, context_length, settings, own)
    )
    other_bytes = weights_bytes + slot_states_bytes + tables_bytes
    max_snapshots = settings.sequence_cache_size if spec.state_bytes else 0
    if spec.keeps_kv:
        num_blocks = settings.num_blocks or default_num_blocks(block_bytes, other_bytes, own)
        num_blocks = max(num_blocks, spec.page_tokens // settings.block_size)
        kv_bytes = num_blocks * block_bytes
        limit_bytes = kv_bytes + slot_states_bytes
        if settings.num_blocks:  # so many positions, whatever gathers take
            longest = min(num_blocks * settings.block_size, context_length)
            limit_bytes += longest * spec.gather_token_bytes
    else:  # recurrent state has the same size at any length
        if settings.num_blocks:
            logger.warning("--num-blocks has no effect: this model has no KV cache")
        num_blocks = num_slots * -(-context_length // settings.block_size)
        snapshot_room_bytes = own.room_bytes(other_bytes)
        max_snapshots = min(max_snapshots, snapshot_room_bytes // spec.state_bytes)
        kv_bytes = num_blocks * block_bytes
        limit_bytes = kv_bytes + slot_states_bytes + max_snapshots * spec.state_bytes
    return MemorySizes(
        block_bytes=block_bytes,
        num_slots=num_slots,
        decode_rows=spec.max_sequences or _decode_rows(settings, num_blocks * settings.block_size),
        num_blocks=num_blocks,
        max_snapshots=max_snapshots,
        kv_bytes=kv_bytes,
        limit_bytes=limit_bytes,
    )


def _decode_rows(settings: Settings, tokens: int) -> int:
    """Return ``--max-batch-size``. Without it, on a GPU, more than its default if there is memory
    for `ROW_TOKENS` in each row: a step of more rows takes hardly longer there."""
    rows = settings.max_batch_size
    if "max_batch_size" in settings.given or mx.default_device() != mx.gpu:
        return rows
    return max(rows, min(MAX_ROWS, settings.completion_batch_size, tokens // ROW_TOKENS))


@dataclass(frozen=True)
class EngineMemory:
    """The memory of one engine, or of one of its ranks, weights included."""

    size_bytes: int
    is_budget: bool  # exclusive to the engine; otherwise the machine is shared

    @classmethod
    def of(cls, settings: Settings) -> EngineMemory:
        """Return ``--memory-gb``, or an equal share for each of ``--engines`` of
        ``--fleet-memory-gb`` or the device's memory, divided equally among the ranks on this
        machine. Where there are several models, their engines get ``--memory-gb``."""
        device = device_memory_bytes()
        if settings.memory_gb is not None:
            return cls(min(device, int(settings.memory_gb * 1e9)) // settings.ranks_here, True)
        is_budget = settings.fleet_memory_gb is not None
        if settings.fleet_memory_gb is not None:
            device = min(device, int(settings.fleet_memory_gb * 1e9))
        return cls(device // settings.engines // settings.ranks_here, is_budget)

    def at_most(self, size_bytes: int) -> EngineMemory:
        """Return this memory, or the smaller memory of another rank, which keeps as much KV."""
        if size_bytes >= self.size_bytes:
            return self
        logger.info(
            "using the sizes of a rank with %.1f GB of memory; this one has %.1f GB",
            size_bytes / 1e9,
            self.size_bytes / 1e9,
        )
        return EngineMemory(size_bytes, self.is_budget)

    def left_bytes(self, other_bytes: int) -> int:
        kept_bytes = BUFFER_CACHE_BYTES if mx.default_device() == mx.gpu else 0
        return self.size_bytes - other_bytes - kept_bytes - HEADROOM_BYTES

    def room_bytes(self, other_bytes: int) -> int:
        """Return the memory for caches next to ``other_bytes``."""
        share = HOST_SHARE
        if self.is_budget:
            share = 1.0
        elif mx.default_device() == mx.gpu:
            share = METAL_SHARE if mx.metal.is_available() else GPU_SHARE
        return max(0, int(self.left_bytes(other_bytes) * share))


def default_num_blocks(block_bytes: int, other_bytes: int, own: EngineMemory) -> int:
    """Return the blocks that fit into ``own`` memory next to ``other_bytes`` (mostly weights).

    Never fewer than `MIN_BLOCKS`, or as many of these as fit; then a warning is logged.
    """
    left_bytes = max(0, own.left_bytes(other_bytes))
    least = max(FEWEST_BLOCKS, min(MIN_BLOCKS, left_bytes // block_bytes))
    if least < MIN_BLOCKS:
        logger.warning(
            "%d blocks of KV cache take %.1f GB, and the weights leave %.1f GB for them; "
            "--num-blocks sets another number",
            least,
            least * block_bytes / 1e9,
            left_bytes / 1e9,
        )
    return max(least, own.room_bytes(other_bytes) // block_bytes)


def _longest(
    held_bytes: int, spec: ExecutorSpec, context_length: int, settings: Settings, own: EngineMemory
) -> int:
    """Return the longest possible sequence. Some models allow ten million positions, of which
    only a fraction fits next to ``held_bytes``."""
    if not spec.keeps_kv:
        return context_length
    room = own.room_bytes(held_bytes) // spec.token_bytes
    blocks = settings.num_blocks or MIN_BLOCKS
    return min(context_length, max(room, blocks * settings.block_size))


def table_bytes(sequences: int, context_length: int) -> int:
    """Return the max memory that sampling keeps for ``sequences`` with penalties.

    These are their tokens (`engine.sampling.history`), in a table that doubles when it grows.
    """
    return 2 * sequences * context_length * int(mx.int32.size)


def device_memory_bytes() -> int:
    """Return Metal's recommended working set, a CUDA device's memory, or the machine's.

    The machine's memory is capped by a container's limit.
    """
    if mx.default_device() == mx.gpu:
        info = mx.device_info()
        size = info.get("max_recommended_working_set_size") or info.get("total_memory")
        if size:
            return int(size)
    return usable_bytes()


def set_memory_limit(weights_bytes: int, sizes: MemorySizes) -> None:
    """Make MLX wait for the arrays of a step before it allocates more, if a Mac's memory beyond the
    ledger and its headroom were used: it dispatches several layers ahead."""
    if mx.metal.is_available() and mx.default_device() == mx.gpu:
        mx.set_memory_limit(weights_bytes + sizes.limit_bytes + HEADROOM_BYTES)


def set_limits(own: EngineMemory) -> None:
    """Limit the freed buffers that MLX keeps.

    On Metal, also keep MLX's memory resident, up to this engine's share of the recommended working
    set.
    """
    mx.set_cache_limit(BUFFER_CACHE_BYTES)
    if mx.metal.is_available() and mx.default_device() == mx.gpu:
        mx.set_wired_limit(own.size_bytes)
