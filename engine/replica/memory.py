"""How much memory the KV of running sequences and kept blocks may take."""

from __future__ import annotations

import logging
import os

import mlx.core as mx

logger = logging.getLogger(__name__)

MIN_BLOCKS = 2048
HEADROOM_BYTES = 1 << 30
"""Left for a step's transients and for MLX's buffer cache."""
GPU_SHARE = 0.9
HOST_SHARE = 0.4
"""Of what the weights leave: a GPU's memory is ours, a machine's is shared."""
BUFFER_CACHE_BYTES = 512 << 20


def default_num_blocks(block_bytes: int, other_bytes: int, engines: int) -> int:
    """The blocks that fit on this device beside ``other_bytes``, the weights first of all;
    never under `MIN_BLOCKS`, but then with a warning.

    ``engines`` on one machine share its memory.
    """
    room = _left_bytes(other_bytes, engines)
    if room < MIN_BLOCKS * block_bytes:
        logger.warning(
            "%d blocks of KV cache take %.1f GB, and beside the weights there is room for %.1f GB: "
            "a smaller --num-blocks is safer",
            MIN_BLOCKS,
            MIN_BLOCKS * block_bytes / 1e9,
            max(room, 0) / 1e9,
        )
    return max(MIN_BLOCKS, room_bytes(other_bytes, engines) // block_bytes)


def room_bytes(other_bytes: int, engines: int) -> int:
    """What may be taken of this device beside ``other_bytes``."""
    share = GPU_SHARE if mx.default_device() == mx.gpu else HOST_SHARE
    return max(0, int(_left_bytes(other_bytes, engines) * share))


def table_bytes(sequences: int, context_length: int) -> int:
    """The most that sampling keeps of ``sequences`` whose penalties look back: their tokens
    (`engine.sampling.history`), in a table that doubles when it grows."""
    return 2 * sequences * context_length * int(mx.int32.size)


def device_memory_bytes() -> int:
    """Metal's recommended working set, a CUDA device's memory, or the machine's, as far
    as a container's limit lets us have it."""
    if mx.default_device() == mx.gpu:
        info = mx.device_info()
        size = info.get("max_recommended_working_set_size") or info.get("memory_size")
        if size:
            return int(size)
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(total, _container_limit_bytes() or total)


def set_limits(engines: int) -> None:
    """Keeps MLX from holding freed buffers without bound; on Metal also keeps what it uses
    resident, up to this engine's part of what the system recommends."""
    mx.set_cache_limit(BUFFER_CACHE_BYTES)
    if mx.metal.is_available() and mx.default_device() == mx.gpu:
        mx.set_wired_limit(device_memory_bytes() // engines)


def _left_bytes(other_bytes: int, engines: int) -> int:
    return device_memory_bytes() // engines - other_bytes - HEADROOM_BYTES


def _container_limit_bytes() -> int | None:
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            with open(path) as file:
                return int(file.read())
        except (OSError, ValueError):
            continue
    return None
