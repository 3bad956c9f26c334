"""Builds one replica: the executor that suits the model, the memory sizes, the scheduler."""

from __future__ import annotations

import gc
import logging
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import mlx.core as mx

from engine import device
from engine.backend import allocation
from engine.batch.ragged import RaggedBatch
from engine.cache.quantization import Precision
from engine.device import OutsideLayers
from engine.executor.base import Executor, ExecutorSpec
from engine.executor.draft_model import DraftModel
from engine.model.load import LoadedModel
from engine.parallel.group import RankGroup, RankSampler
from engine.parallel.leader import Leader, LeadingExecutor
from engine.plan import page_tokens
from engine.proving.choose import choose_executor
from engine.proving.remembered import AgreedRecord, ProofRecord, Record, code_digest
from engine.replica import memory
from engine.replica.adapters import NamedAdapters, adaptable
from engine.replica.draft_model import open_draft_model
from engine.replica.head import ServedHead, with_head
from engine.replica.kept_costs import KeptCosts
from engine.replica.memory import EngineMemory, MemorySizes
from engine.replica.rehearsal import rehearse, warm_up
from engine.replica.speculation import make_speculator
from engine.replica.vision import served_vision, vision_bytes, with_pictures
from engine.scheduler import Scheduler, SchedulerConfig
from engine.speculation.speculator import Speculator
from engine.vision.load import ServedVision
from shared.hashing import namespace_root
from shared.settings import Settings

logger = logging.getLogger(__name__)

AGENT_TOKENS = 10_000
"""Tokens of a coding agent's conversation early in a session, in the line that says what fits."""
LAYERS_REVISION = 1
"""Raised with every change of our own layers or quantization that corrects keys and values: those
stored before are not used any more."""


@dataclass(frozen=True, kw_only=True)
class Replica:
    """A model that is ready to run, without processes and sockets around it."""

    executor: Executor
    scheduler: Scheduler
    namespace: bytes  # the first parent hash of blocks
    num_blocks: int  # blocks that fit in memory; states for models without KV
    uses_store: bool  # whether blocks are stored in the kvstore and fetched from it
    capabilities: tuple[str, ...]  # sent in the hello
    draft_model: DraftModel | None = None
    adapters: NamedAdapters | None = None  # None: requests cannot name adapters
    vision: ServedVision | None = None
    kept_costs: KeptCosts | None = None  # of drafts

    def keep_costs(self, at_once: bool = False) -> None:
        """Write the learned costs of drafts, if the last write was long ago or ``at_once``."""
        if self.kept_costs is not None:
            self.kept_costs.keep(at_once)


def build_replica(
    loaded: LoadedModel,
    settings: Settings,
    proofs: Path | None = None,
    leader: Leader | None = None,
) -> Replica:
    """Choose the executor of ``loaded``, size the memory and configure the scheduler.

    A passed proof is stored in the folder ``proofs``, and not repeated unless ``--prove always``
    is set. With several ranks, this one is the ``leader``."""
    own = EngineMemory.of(settings)
    memory.set_limits(own)  # first: freed buffers of loading and proving count as well
    layers = device.move_layers(loaded.model, settings.cpu_precision, own.size_bytes)
    own_record = None if proofs is None else _record(proofs, loaded, settings, layers)
    record: Record | None = own_record
    adapted = adaptable(loaded.model, settings)
    group, sized = None, own
    if leader is not None:
        group, sized = leader.group, own.at_most(leader.smallest_bytes)
        record = agreed = AgreedRecord(own_record.read() if own_record else None, own_record)
        leader.plans.start(agreed.encode())
    executor = choose_executor_of(loaded, settings, record, group)
    # The other ranks have no head.
    head = with_head(executor, loaded, settings, own.size_bytes) if leader is None else None
    other_bytes = 0
    if head is not None:
        executor, other_bytes = head.executor, head.nbytes
    if layers is not None:
        other_bytes += layers.nbytes  # about as many if the whole pass has packed them anew
        batch_class = getattr(executor, "batch_class", RaggedBatch)
        layers.keep_packed() if batch_class.runs_model else layers.drop()
    served = served_vision(executor, loaded, settings, own.size_bytes, head)
    draft_model, draft_bytes = _draft_model(executor, loaded, settings, proofs)
    other_bytes += 0 if adapted is None else adapted.reserved_bytes
    slots_bytes = 0 if draft_model is None else draft_model.slots_bytes
    other_bytes += draft_bytes + slots_bytes + vision_bytes(served)
    sizes = memory.size_memory(executor.spec, loaded, settings, other_bytes, sized)
    memory.set_memory_limit(memory.weights_bytes(loaded) + other_bytes, sizes)
    adapters = None if adapted is None else adapted.opened(executor)
    executor.release_weights(loaded.weight_files)
    _drop_leftovers()
    if leader is not None:
        executor = LeadingExecutor(executor, leader)
    namespace = _block_namespace(executor, loaded, settings, head, layers)
    config = _scheduler_config(executor.spec, loaded, settings, sizes, slots_bytes, namespace)
    _log_sizes(executor.spec, config, sizes)
    speculator = make_speculator(settings, executor.spec, draft_model)
    scheduler = Scheduler(
        with_pictures(config, served),
        speculator=speculator,
        chunk_policy=None if leader else warm_up(executor, config),
    )
    return Replica(
        executor=executor,
        scheduler=scheduler,
        draft_model=draft_model,
        adapters=adapters,
        kept_costs=_kept_costs(own_record, speculator, config, None if leader else executor),
        vision=served,
        namespace=config.namespace,
        num_blocks=config.total_blocks,
        uses_store=config.uses_store,
        capabilities=("batching", "prefix-cache") if config.prefix_cache else (),
    )


def _draft_model(
    executor: Executor, loaded: LoadedModel, settings: Settings, proofs: Path | None
) -> tuple[DraftModel | None, int]:
    """Return the draft model, if there is one that ``executor`` can use, and its bytes."""
    if not executor.spec.verifies_drafts:
        return None, 0
    return open_draft_model(loaded, settings, proofs, executor.wait)


def _kept_costs(
    record: ProofRecord | None,
    speculator: Speculator | None,
    config: SchedulerConfig,
    executor: Executor | None,
) -> KeptCosts | None:
    """Return the stored costs of drafts. If there are none, they are measured, if the
    ``executor`` runs on a device and can start again."""
    if record is None or speculator is None:
        return None
    kept = KeptCosts(record.beside("costs"), speculator.costs)
    if executor is not None and executor.spec.look_ahead and speculator.costs.needs_plain(1):
        rehearse(executor, config, speculator.costs)
    return kept


def build_rank(
    loaded: LoadedModel, settings: Settings, record: AgreedRecord, group: RankGroup
) -> tuple[Executor, bytes]:
    """Return the executor of a rank other than 0, given the ``record`` sent by rank 0, and the
    root of the block hashes."""
    memory.set_limits(EngineMemory.of(settings))
    executor = choose_executor_of(loaded, settings, record, group)
    executor.release_weights(loaded.weight_files)
    _drop_leftovers()
    return executor, _block_namespace(executor, loaded, settings, None, None)


def _drop_leftovers() -> None:
    """Release what proofs left behind."""
    gc.collect()
    mx.clear_cache()
    allocation.give_back()


def _record(
    proofs: Path, loaded: LoadedModel, settings: Settings, layers: OutsideLayers | None
) -> ProofRecord:
    """Return the file for the proof of ``loaded``. Its name depends on the model, its own code,
    and settings.

    Which layers of a model leave MLX is measured at each start; different layers need another
    proof."""
    own_code = code_digest(loaded.path.glob("*.py"))
    model = loaded.fingerprint, loaded.adapter, own_code, loaded.vocab_size
    kv = settings.block_size, settings.kv_bits, settings.kv_group_size
    adapted = bool(settings.adapter or settings.max_adapters)  # with other graphs
    moved = None if layers is None else layers.names
    record = ProofRecord(proofs, model, kv, moved, settings.ranks, adapted)
    if settings.prove == "always":
        record.forget()
    return record


def choose_executor_of(
    loaded: LoadedModel, settings: Settings, record: Record | None, group: RankGroup | None
) -> Executor:
    """Return the fastest executor that is proven correct, and log the features ``loaded`` cannot
    have.

    All ranks of a ``group`` call this once their weights are loaded, and get the same result."""
    if group is not None:
        group.barrier()
    with nullcontext() if group is None else group.same_logits(loaded.model):
        executor, reason, unquantized = choose_executor(
            loaded.model,
            loaded.vocab_size,
            page_tokens(settings.block_size),
            Precision(settings.kv_bits, settings.kv_group_size),
            record,
        )
    if group is not None:
        executor.use_sampler(RankSampler(group))
        if group.rank:
            return executor  # rank 0 sends the rest
    if executor.spec.attends_by:
        logger.info("attention: %s", executor.spec.attends_by)
    if reason:
        logger.warning(
            "requests are computed %s, %s prefix reuse, since this model allows no more: %s",
            executor.spec.batching,
            "with" if executor.spec.prefix_cache else "without",
            reason,
        )
    if settings.deterministic and not executor.make_deterministic():
        logger.info(
            "the last bits of a token's scores may depend on the batch: MLX computes this model, "
            "or it has experts with quantized weights"
        )
    if unquantized:
        logger.warning("the KV cache is not quantized in %s", unquantized)
    return executor


def _log_sizes(spec: ExecutorSpec, config: SchedulerConfig, sizes: MemorySizes) -> None:
    if spec.keeps_kv:
        longest = min(config.capacity, config.context_length)
        each = min(AGENT_TOKENS, longest)
        logger.info(
            "KV cache: %.1f GB in %d bits, for %s tokens: the longest conversation has %s, and %s "
            "of %s fit at once",
            sizes.kv_bytes / 1e9,
            spec.kv_bits,
            f"{config.capacity:,}",
            f"{longest:,}",
            f"{config.capacity // each:,}",
            f"{each:,}",
        )
    if spec.state_bytes:
        logger.info(
            "recurrent state: %.2f MB for each of %d sequences, and for up to %d that are kept",
            spec.state_bytes / 1e6,
            sizes.num_slots,
            sizes.max_snapshots,
        )


def _scheduler_config(
    spec: ExecutorSpec,
    loaded: LoadedModel,
    settings: Settings,
    sizes: MemorySizes,
    draft_bytes: int,
    namespace: bytes,
) -> SchedulerConfig:
    reuses_prefixes = spec.prefix_cache and (sizes.max_snapshots > 0 or not spec.state_bytes)
    return SchedulerConfig(
        block_size=settings.block_size,
        block_bytes=sizes.block_bytes,
        gather_token_bytes=spec.gather_token_bytes,
        gather_rows=spec.gather_rows,
        pads_gathers=spec.pads_gathers,
        unpacked_token_bytes=spec.unpacked_token_bytes,
        batches_chunks=spec.batches_chunks,
        state_bytes=spec.state_bytes,
        max_snapshots=sizes.max_snapshots,
        keeps_kv=spec.keeps_kv,
        limit_bytes=sizes.limit_bytes,
        num_blocks=sizes.num_blocks if spec.keeps_kv else sizes.num_slots + sizes.max_snapshots,
        draft_bytes=draft_bytes,
        context_length=loaded.context_length,
        max_batch_size=sizes.decode_rows,
        prefill_batch_size=spec.max_sequences or settings.prefill_batch_size,
        completion_batch_size=sizes.num_slots,
        prefill_chunk_tokens=settings.prefill_chunk_tokens,
        max_chunk_tokens=spec.max_chunk_tokens,
        has_experts=spec.has_experts,
        decodes_ends=spec.decodes_ends and not spec.look_ahead,
        layers=spec.layers,
        pass_token_bytes=spec.pass_token_bytes,
        score_bytes=spec.score_bytes,
        streams_share=settings.streams_share,
        namespace=namespace,
        prefix_cache=reuses_prefixes,
        store_enabled=bool(settings.kvstore_socket) and not settings.no_ssd,
        store_policy=settings.ssd_policy,
        look_ahead=spec.look_ahead,
        vocab_size=loaded.vocab_size,
        eos_token_ids=loaded.eos_token_ids,
    )


def _block_namespace(
    executor: Executor,
    loaded: LoadedModel,
    settings: Settings,
    head: ServedHead | None,
    layers: OutsideLayers | None,
) -> bytes:
    """Return the root of the block hashes, the same for all ranks of an engine."""
    products: list[str] = []
    if settings.ranks == 1:
        products += [] if layers is None else layers.products
        products += ["same bits"] * executor.deterministic
    return namespace_root(
        fingerprint=loaded.fingerprint,
        adapter=loaded.adapter,
        kv_bits=settings.kv_bits,
        kv_group_size=settings.kv_group_size,
        block_size=settings.block_size,
        head="" if head is None else head.fingerprint,
        tensor_parallel=settings.ranks,
        products=products,
        software=(f"mlx-lm {metadata.version('mlx-lm')}", f"layers {LAYERS_REVISION}"),
    )
