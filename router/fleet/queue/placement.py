"""The choice of an engine: the one with the longest cached prefix, unless it is clearly busier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from router.fleet.engines.engine import Engine
from router.fleet.sequences.remote_request import RemoteRequest
from shared.hashing import Picture, block_hashes, prompt_root

PromptBlocks = Mapping[tuple[bytes, int], Sequence[bytes]]
"""The hashes of a prompt's blocks, by the engines' namespace and block size."""


def prompt_blocks(
    engines: Sequence[Engine],
    token_ids: Sequence[int],
    cache_salt: str,
    images: Sequence[Picture] = (),
    adapter: str = "",
) -> PromptBlocks:
    """Return the hashes of a prompt for all of ``engines``; none if there is no choice.
    ``images`` are the prompt's images, and ``adapter`` is the digest of its adapter.

    Each token takes a tenth of a microsecond: run this on the threads of a `WorkPool`."""
    roots = {_root(engine) for engine in engines} if len(engines) > 1 else set()
    return {
        (namespace, size): block_hashes(
            prompt_root(namespace, adapter, cache_salt), token_ids, size, images
        )
        for namespace, size in roots
    }


def choose_engine(engines: Sequence[Engine], sequence: RemoteRequest) -> Engine:
    """Return the best of ``engines`` for ``sequence``. Each must have capacity, and at least one
    must support the sequence."""
    if sequence.names_adapter:
        engines = [engine for engine in engines if engine.takes_adapters]
    if len(engines) == 1:
        return engines[0]
    least = min(len(engine.request_ids) for engine in engines)
    # Even a cached prefix does not justify an engine that is clearly busier.
    ranked = [engine for engine in engines if len(engine.request_ids) <= 2 * least + 4]
    best, most = ranked[0], 0
    for engine in ranked:
        blocks = sequence.prompt_blocks.get(_root(engine), ())
        found = engine.prefix_index.num_cached_blocks(blocks, max(most, 1))
        is_freer = len(engine.request_ids) < len(best.request_ids)
        if found > most or (found == most and is_freer):
            best, most = engine, found
    best.prefix_index.assume(sequence.prompt_blocks.get(_root(best), ()))
    return best


def _root(engine: Engine) -> tuple[bytes, int]:
    return engine.hello.namespace, engine.hello.block_size
