"""An engine's report to its router on requests and on itself."""

from __future__ import annotations

from dataclasses import asdict

from engine.scheduler.config import SchedulerConfig
from engine.scheduler.memory import Memory
from engine.scheduler.outputs import Counters
from engine.scheduler.planning.passes import OpenPasses
from engine.scheduler.planning.prefilling import Prefilling
from engine.scheduler.sequences.sequence import Sequence
from engine.scheduler.sequences.sequence_table import SequenceTable
from shared import wire


def live_requests(
    sequences: SequenceTable, passes: OpenPasses, config: SchedulerConfig
) -> list[wire.LiveRequest]:
    """Return every request with its progress."""
    return [
        wire.LiveRequest(
            request_id=seq.request.request_id,
            attempt=seq.request.attempt,
            generated=seq.num_output_tokens,
            computed_prompt_tokens=_computed_prompt_tokens(seq, passes, config),
            cached_prompt_tokens=seq.cached_ram_tokens + seq.cached_ssd_tokens,
        )
        for seq in sequences.live.values()
    ]


def _computed_prompt_tokens(seq: Sequence, passes: OpenPasses, config: SchedulerConfig) -> int:
    """Return how many tokens of the prompt of ``seq`` are computed once the plans so far have run.
    An open pass counts in proportion to its computed layers."""
    computed = seq.num_computed_tokens
    if (one := passes.of(seq)) is not None:
        computed += (seq.pass_end - seq.num_computed_tokens) * one.layers_done // config.layers
    return min(computed, seq.num_prompt_tokens)


def engine_stats(
    config: SchedulerConfig,
    sequences: SequenceTable,
    memory: Memory,
    counters: Counters,
    prefilling: Prefilling,
    *,
    drafts: wire.DraftStats | None,
) -> wire.EngineStats:
    """Return gauges and counters. Used blocks are all bytes in use, in blocks, including cached
    pages. Of states and of what passes gather, only what has no memory beside the blocks counts."""
    totals = {f"{name}_total": total for name, total in asdict(counters).items()}
    # The memory of pictures is separate: nothing else waits for it.
    limit_bytes = memory.ledger.limit_bytes - config.picture_bytes
    unit = config.unit_bytes
    lost_bytes = config.limit_bytes + config.draft_bytes - limit_bytes  # when memory ran out
    total = max(0, config.total_blocks - -(-lost_bytes // unit))
    free_bytes = memory.pages.num_free * config.page_bytes + config.picture_bytes
    if config.num_blocks:
        beside_bytes = config.limit_bytes - config.total_blocks * unit
        states_bytes = len(memory.used_slots) * config.state_bytes
        free_bytes += min(memory.gather_bytes + states_bytes, beside_bytes)
    used = min(total, -(-(memory.ledger.used_bytes - free_bytes) // unit))
    return wire.EngineStats(
        running=sequences.num_running,
        waiting=len(sequences.waiting) + len(sequences.loading),
        total_blocks=total,
        used_blocks=used,
        free_blocks=total - used,
        limit_bytes=limit_bytes,
        # Pages of background sequences are given to other sequences on demand.
        unevictable_bytes=memory.used_bytes(of_background=False),
        kept_states=len(memory.snapshots),
        open_passes=len(prefilling.passes),
        drafts=drafts,
        image_bytes=prefilling.pictures.used_bytes,
        **totals,
    )
