"""One replica put together: the model, the executor that suits it, the scheduler."""

from __future__ import annotations

import gc
import logging
from dataclasses import dataclass

from mlx.utils import tree_flatten

from engine.backend import allocation
from engine.batch import device
from engine.cache.quantization import Precision
from engine.executor.base import Executor
from engine.model.load import LoadedModel
from engine.proving.choose import choose_executor
from engine.replica import memory
from engine.scheduler import Scheduler, SchedulerConfig
from shared.hashing import namespace
from shared.settings import Settings

logger = logging.getLogger(__name__)

PREFAULT_BYTES = 256 * 1024 * 1024
"""Of memory for KV, from the start: as much as a first long prompt takes of a small model."""


@dataclass(frozen=True, kw_only=True)
class Replica:
    """``namespace`` is the root of the block hashes, ``uses_store`` whether blocks go to
    the kvstore and come from there; ``capabilities`` go into the hello. Where a model keeps
    nothing for each token, ``num_blocks`` counts states."""

    executor: Executor
    scheduler: Scheduler
    namespace: bytes
    num_blocks: int
    uses_store: bool
    capabilities: tuple[str, ...]


def build_replica(loaded: LoadedModel, settings: Settings) -> Replica:
    """Proves the model batchable, sizes the memory, and puts executor and scheduler together."""
    device.tune(loaded.model)
    precision = Precision(settings.kv_bits, settings.kv_group_size)
    executor, reason, unquantized = choose_executor(
        loaded.model, loaded.vocab_size, settings.block_size, precision
    )
    if reason:
        logger.warning(
            "requests are computed %s, %s prefix reuse, since this model allows no more: %s",
            executor.spec.batching,
            "with" if executor.spec.prefix_cache else "without",
            reason,
        )
    if unquantized:
        logger.warning("the KV cache is not quantized in %s", unquantized)
    block_bytes = executor.spec.block_token_bytes * settings.block_size
    slot_block_bytes = executor.spec.slot_token_bytes * settings.block_size
    weights = sum(array.nbytes for _, array in tree_flatten(loaded.model.parameters()))
    limit = executor.spec.max_sequences
    slots = limit or settings.completion_batch_size
    slot_states_bytes = slots * executor.spec.state_bytes
    tables_bytes = memory.table_bytes(slots, loaded.context_length)
    others_bytes = weights + slot_states_bytes + tables_bytes
    max_snapshots = settings.sequence_cache_size if executor.spec.state_bytes else 0
    if executor.spec.keeps_kv:
        num_blocks = settings.num_blocks or memory.default_num_blocks(
            block_bytes, others_bytes, settings.engines
        )
        kv_bytes = max(num_blocks * block_bytes, slot_block_bytes)
        limit_bytes = kv_bytes + slot_states_bytes
    else:  # state stays as large as it is at any length
        if settings.num_blocks:
            logger.warning("--num-blocks has no effect: this model keeps nothing for each token")
        num_blocks = slots * -(-loaded.context_length // settings.block_size)
        kept_bytes = memory.room_bytes(others_bytes, settings.engines)
        max_snapshots = min(max_snapshots, kept_bytes // executor.spec.state_bytes)
        kv_bytes = num_blocks * block_bytes
        limit_bytes = kv_bytes + slot_states_bytes + max_snapshots * executor.spec.state_bytes
    memory.set_limits(settings.engines)
    gc.collect()  # what the proof left
    if device.uses_host():
        allocation.prefault(min(limit_bytes, PREFAULT_BYTES))
    sessions = min(limit or settings.max_batch_size, kv_bytes // slot_block_bytes)
    if executor.spec.keeps_kv:
        logger.info(
            "KV cache: %d blocks of %d tokens in %d bits, %.1f GB: %d sequences of %d tokens each",
            num_blocks,
            settings.block_size,
            executor.spec.kv_bits,
            kv_bytes / 1e9,
            sessions,
            min(kv_bytes // executor.spec.slot_token_bytes // sessions, loaded.context_length),
        )
    if executor.spec.state_bytes:
        logger.info(
            "recurrent state: %.2f MB for each of %d sequences, and for up to %d that are kept",
            executor.spec.state_bytes / 1e6,
            slots,
            max_snapshots,
        )
    prefix_cache = executor.spec.prefix_cache and (
        max_snapshots > 0 or not executor.spec.state_bytes
    )
    root = namespace(
        fingerprint=loaded.fingerprint,
        adapter=loaded.adapter,
        kv_bits=settings.kv_bits,
        kv_group_size=settings.kv_group_size,
        block_size=settings.block_size,
    )
    config = SchedulerConfig(
        block_size=settings.block_size,
        block_bytes=block_bytes,
        slot_block_bytes=slot_block_bytes,
        state_bytes=executor.spec.state_bytes,
        max_snapshots=max_snapshots,
        keeps_kv=executor.spec.keeps_kv,
        limit_bytes=limit_bytes,
        context_length=loaded.context_length,
        max_batch_size=limit or settings.max_batch_size,
        prefill_batch_size=limit or settings.prefill_batch_size,
        completion_batch_size=slots,
        prefill_chunk_tokens=settings.prefill_chunk_tokens,
        namespace=root,
        prefix_cache=prefix_cache,
        store_enabled=settings.kvstore_socket is not None and not settings.no_ssd,
        store_policy=settings.ssd_policy,
        look_ahead=executor.spec.look_ahead,
        vocab_size=loaded.vocab_size,
        eos_token_ids=loaded.eos_token_ids,
    )
    capabilities = ("batching", "prefix-cache") if prefix_cache else ()
    return Replica(
        executor=executor,
        scheduler=Scheduler(config),
        namespace=root,
        num_blocks=num_blocks if executor.spec.keeps_kv else slots + max_snapshots,
        uses_store=config.uses_store,
        capabilities=capabilities,
    )
