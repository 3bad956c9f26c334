"""The choice of an engine: the one with most of the prefix, unless it is clearly busier."""

from __future__ import annotations

from collections.abc import Sequence

from router.fleet.engines import Engine
from router.fleet.remote_sequence import RemoteSequence
from shared.hashing import block_hashes, salted_root


def choose_engine(engines: Sequence[Engine], sequence: RemoteSequence) -> Engine:
    """Return the best of ``engines`` for ``sequence``: at least one, each with capacity."""
    if len(engines) == 1:
        return engines[0]
    least = min(len(engine.request_ids) for engine in engines)
    ranked = [engine for engine in engines if not _clearly_busier(len(engine.request_ids), least)]
    tokens = sequence.submit.token_ids + sequence.output_token_ids
    blocks: dict[tuple[bytes, int], list[bytes]] = {}
    for engine in ranked:
        root = (engine.hello.namespace, engine.hello.block_size)
        if root not in blocks:
            start = salted_root(root[0], sequence.submit.cache_salt)
            blocks[root] = block_hashes(start, tokens, root[1])
    best = max(
        ranked,
        key=lambda engine: (
            engine.prefix_index.num_cached_blocks(
                blocks[engine.hello.namespace, engine.hello.block_size]
            ),
            -len(engine.request_ids),
        ),
    )
    best.prefix_index.assume(blocks[best.hello.namespace, best.hello.block_size])
    return best


def _clearly_busier(sequences: int, least: int) -> bool:
    return sequences > 2 * least + 4
