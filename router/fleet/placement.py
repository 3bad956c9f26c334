"""Which engine a sequence goes to: the one that has most of its prefix, unless that is busier."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shared.hashing import block_hashes, salted
from shared.wire import CacheEvents

if TYPE_CHECKING:
    from router.fleet.engines import Engine
    from router.fleet.remote_sequence import RemoteSequence

_ASSUMED_LIMIT = 65_536


class PrefixIndex:
    """The blocks an engine has in RAM, as it reported, and those it is about to have,
    as assumed when a sequence was placed there. The latter are bounded (LRU)."""

    def __init__(self, assumed_limit: int = _ASSUMED_LIMIT) -> None:
        self._reported: set[bytes] = set()
        self._assumed: OrderedDict[bytes, None] = OrderedDict()
        self._assumed_limit = assumed_limit
        self._number: int | None = None

    def update(self, events: CacheEvents) -> None:
        if events.snapshot or self._number is None or events.number != self._number + 1:
            self._reported = set(events.added)
            self._assumed.clear()
        else:
            self._reported.update(events.added)
        self._number = events.number
        self._reported.difference_update(events.removed)
        for block in events.removed:
            self._assumed.pop(block, None)

    def assume(self, blocks: Sequence[bytes]) -> None:
        for block in blocks:
            self._assumed[block] = None
            self._assumed.move_to_end(block)
        while len(self._assumed) > self._assumed_limit:
            self._assumed.popitem(last=False)

    def num_cached_blocks(self, blocks: Sequence[bytes]) -> int:
        """How many of ``blocks`` need not be computed there: those up to the last one that is
        known. The ones before it come with it, or, where it stands for recurrent state, are
        not reported."""
        for count in range(len(blocks), 0, -1):
            if blocks[count - 1] in self._reported or blocks[count - 1] in self._assumed:
                return count
        return 0


def choose_engine(engines: Sequence[Engine], sequence: RemoteSequence) -> Engine:
    """The best of ``engines`` (at least one, each with a place) for ``sequence``."""
    if len(engines) == 1:
        return engines[0]
    idle = min(engines, key=lambda engine: len(engine.sequences))
    ranked = [
        engine
        for engine in engines
        if not _clearly_busier(len(engine.sequences), len(idle.sequences))
    ]
    blocks: dict[tuple[bytes, int], list[bytes]] = {}
    for engine in ranked:
        root = (engine.hello.namespace, engine.hello.block_size)
        if root not in blocks:
            start = salted(root[0], sequence.spec.cache_salt)
            blocks[root] = block_hashes(
                start, sequence.spec.prompt_token_ids + sequence.output_token_ids, root[1]
            )
    best = max(
        ranked,
        key=lambda engine: (
            engine.prefix_index.num_cached_blocks(
                blocks[engine.hello.namespace, engine.hello.block_size]
            ),
            -len(engine.sequences),
        ),
    )
    best.prefix_index.assume(blocks[best.hello.namespace, best.hello.block_size])
    return best


def _clearly_busier(sequences: int, least: int) -> bool:
    return sequences > 2 * least + 4
