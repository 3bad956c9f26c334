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
    # Even a cached prefix is not worth an engine that is clearly busier.
    ranked = [engine for engine in engines if len(engine.request_ids) <= 2 * least + 4]
    tokens = sequence.submit.token_ids + sequence.output_token_ids
    roots = {each: (each.hello.namespace, each.hello.block_size) for each in ranked}
    blocks = {
        root: block_hashes(salted_root(root[0], sequence.submit.cache_salt), tokens, root[1])
        for root in set(roots.values())
    }

    def score(engine: Engine) -> tuple[int, int]:
        cached = engine.prefix_index.num_cached_blocks(blocks[roots[engine]])
        return cached, -len(engine.request_ids)

    best = max(ranked, key=score)
    best.prefix_index.assume(blocks[roots[best]])
    return best
