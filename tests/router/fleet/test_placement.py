"""What placement by prefix is worth: conversations on engines whose caches do not hold them all."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Sequence

from router.fleet.engines.engine import Engine
from router.fleet.queue.placement import choose_engine, prompt_blocks
from router.fleet.sequences.remote_sequence import RemoteSequence
from router.fleet.tenants.tenant import Tenant
from shared.hashing import block_hashes
from shared.wire import CacheEvents
from tests.router.scripted_engine import make_hello, make_submit

ENGINES, CONVERSATIONS, TURNS = 4, 50, 8
BLOCK, CACHE_BLOCKS = 16, 400
IN_FLIGHT = 12
"""Requests that run at once; each turn of a conversation waits for the one before."""


class CachingEngine:
    """An engine whose cache drops the blocks that were not used for longest."""

    def __init__(self, number: int) -> None:
        hello = make_hello(f"e{number}", max_sequences=32)
        self.engine = Engine(b"", hello, hello.engine, stall_limit_s=1.0)
        self._blocks: OrderedDict[bytes, None] = OrderedDict()
        self._events = 0
        self.computed_tokens = 0

    def serve(self, tokens: Sequence[int]) -> int:
        """Return how many of ``tokens`` were cached. All are then, as far as there is room."""
        hashes = block_hashes(self.engine.hello.namespace, tokens, BLOCK)
        found = 0
        while found < len(hashes) and hashes[found] in self._blocks:
            found += 1
        for each in hashes:
            self._blocks[each] = None
            self._blocks.move_to_end(each)
        removed = [self._blocks.popitem(last=False)[0] for _ in range(self._excess)]
        self._events += 1
        event = CacheEvents(number=self._events, added=list(hashes), removed=removed)
        self.engine.prefix_index.update(event)
        self.computed_tokens += len(tokens) - found * BLOCK
        return found * BLOCK

    @property
    def _excess(self) -> int:
        return max(0, len(self._blocks) - CACHE_BLOCKS)


Choose = Callable[[list[Engine], RemoteSequence], Engine]


def run(choose: Choose) -> tuple[float, float]:
    """Serve all conversations. Return the cached share of the prompts' tokens, and the requests of
    the busiest engine over the mean."""
    pick = random.Random(7)
    engines = {each.engine: each for each in map(CachingEngine, range(ENGINES))}
    histories = [[pick.randrange(9999) for _ in range(200)] for _ in range(CONVERSATIONS)]
    turns = [number for number in range(CONVERSATIONS) for _ in range(TURNS)]
    pick.shuffle(turns)  # people answer when they like
    running: list[tuple[Engine, str]] = []
    requests = dict.fromkeys(engines, 0)
    cached = total = 0
    for index, number in enumerate(turns):
        if len(running) == IN_FLIGHT:
            done, request_id = running.pop(0)
            del done.request_ids[request_id]
        histories[number] += [pick.randrange(9999) for _ in range(60)]
        engine = choose(list(engines), sequence(f"r{index}", histories[number], list(engines)))
        engine.request_ids[f"r{index}"] = None
        running.append((engine, f"r{index}"))
        requests[engine] += 1
        cached += engines[engine].serve(histories[number])
        total += len(histories[number])
    return cached / total, max(requests.values()) * ENGINES / len(turns)


def sequence(request_id: str, tokens: Sequence[int], engines: list[Engine]) -> RemoteSequence:
    submit = make_submit(request_id, token_ids=list(tokens))
    blocks = prompt_blocks(engines, submit.token_ids, "")
    return RemoteSequence(submit, Tenant(name="a"), lambda: None, blocks)


def test_placement_by_prefix_doubles_what_is_cached_and_keeps_engines_evenly_busy() -> None:
    by_prefix, busiest = run(choose_engine)
    pick = random.Random(3)
    at_random, _ = run(lambda engines, _: pick.choice(engines))
    print(f"cached: {by_prefix:.0%}, at random {at_random:.0%}; busiest: {busiest:.2f} of the mean")  # noqa: T201
    assert by_prefix >= 2 * at_random
    assert busiest <= 1.5
