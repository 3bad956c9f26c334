"""Many engines behind several routers, by arithmetic: what each part costs, and which reaches
its limit first.

The costs are measured: a router's CPU time for a token and for the heartbeats of engines, and
the time to choose an engine for a prompt. The rest is arithmetic."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from bench.router.alone import Load, cpu_s_of, measured, running_router
from engine.model.load import resolve
from router.fleet.engines.engine import Engine
from router.fleet.queue.placement import choose_engine, prompt_blocks
from router.fleet.sequences.remote_sequence import RemoteSequence
from router.fleet.tenants.tenant import Tenant
from shared import wire
from shared.descriptors import raise_descriptor_limit
from shared.hashing import block_hashes

ENGINES, ROUTERS = 100, 10
PROMPT_TOKENS, ANSWER_TOKENS = 8_000, 250
BATCHES = ((8, 20.0), (64, 40.0))
"""Of an engine: number of sequences, and tokens per second of each."""
IDLE_S = 10.0
CHOICES = 200


@dataclass(frozen=True)
class Costs:
    """Seconds of one core of a router."""

    token_s: float
    heartbeats_s: float
    """For one second of all engines' heartbeats."""
    choice_s: float
    """To choose among all engines, on the event loop."""
    hashes_s: float
    """To hash a prompt, on a thread."""


def fleet(model: str, runs: int) -> None:
    """Print what 100 engines and 10 routers cost, and where the limit is."""
    raise_descriptor_limit()
    directory = resolve(model)
    idle, busy = (
        Load(streams=1, engines=ENGINES, models=1),
        Load(streams=200, engines=20, models=5, rate=10),
    )
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as private,
        running_router(Path(private), directory, idle) as (_, pid),
    ):
        before = cpu_s_of(pid)
        time.sleep(IDLE_S)
        heartbeats_s = (cpu_s_of(pid) - before) / IDLE_S
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as private,
        running_router(Path(private), directory, busy) as (port, pid),
    ):
        tokens = [measured(port, pid, busy) for _ in range(runs)]
    for each in tokens:
        print(each.line("router"))
    token_s = statistics.median(each.us_per_token for each in tokens) / 1e6
    # Heartbeats are included.
    token_s -= (
        heartbeats_s
        * busy.engines
        / ENGINES
        / statistics.median(each.tokens / each.seconds for each in tokens)
    )
    costs = Costs(token_s, heartbeats_s, *placement())
    print(
        f"a token {1e6 * costs.token_s:.1f} us, beats {costs.heartbeats_s:.1%} of a core,", end=" "
    )
    print(f"a choice {1e6 * costs.choice_s:.0f} us, hashes {1e3 * costs.hashes_s:.2f} ms")
    for sequences, rate in BATCHES:
        print(table_row(costs, sequences, rate))


def placement() -> tuple[float, float]:
    """Return the seconds of a choice among engines that each have half of the prompt, and of the
    prompt's hashes."""
    namespace = os.urandom(16)
    tokens = list(range(PROMPT_TOKENS))
    blocks = block_hashes(namespace, tokens, 16)
    engines = []
    for number in range(ENGINES):
        engine = Engine(b"", _hello(f"engine-{number}", namespace), f"engine-{number}", 1.0)
        engine.prefix_index.update(wire.CacheEvents(1, blocks[: len(blocks) // 2], [], True))
        engines.append(engine)
    began = time.perf_counter()
    known = prompt_blocks(engines, tokens, "")
    hashes_s = time.perf_counter() - began
    submit = wire.Submit(
        request_id="1",
        attempt=0,
        token_ids=tokens,
        sampling=wire.SamplingParams(seed=0),
        max_tokens=1,
        stop_token_ids=[],
    )
    sequence = RemoteSequence(submit, Tenant(), lambda: None, known)
    began = time.perf_counter()
    for _ in range(CHOICES):
        choose_engine(engines, sequence)
    return (time.perf_counter() - began) / CHOICES, hashes_s


def table_row(costs: Costs, sequences: int, rate: float) -> str:
    """Return the share of a router's core that engines take with this many sequences of this
    rate."""
    tokens = sequences * rate
    requests = tokens / ANSWER_TOKENS
    by_engine = tokens * costs.token_s / ROUTERS + costs.heartbeats_s / ENGINES
    # A choice visits each engine, so its cost grows with their number too.
    by_pair = requests / ROUTERS * costs.choice_s / ENGINES
    used = ENGINES * by_engine + ENGINES**2 * by_pair
    most = (((by_engine**2 + 4 * by_pair) ** 0.5) - by_engine) / (2 * by_pair)
    return (
        f"engines of {sequences} sequences at {rate:g} tokens/s: {ENGINES * tokens:,.0f} tokens/s,"
        f" {ENGINES * requests:,.0f} requests/s; each router uses {used:.0%} of a core, of which"
        f" tokens {ENGINES * tokens * costs.token_s / ROUTERS:.0%}, beats {costs.heartbeats_s:.0%},"
        f" choices {ENGINES**2 * by_pair:.0%}; {ROUTERS} routers are full at {most:.0f} engines"
    )


def _hello(name: str, namespace: bytes) -> wire.Hello:
    return wire.Hello(
        protocol=wire.PROTOCOL_VERSION,
        engine=name,
        incarnation="0",
        model="model",
        aliases=[],
        fingerprint="",
        context_length=100_000,
        vocab_size=50_000,
        block_size=16,
        total_blocks=100_000,
        max_sequences=64,
        max_batch_size=64,
        namespace=namespace,
        eos_token_ids=[],
        files={},
    )
