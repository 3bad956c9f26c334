"""`python -m bench prompts`: times to first tokens of prompts, and their effect on others.

Real servers are measured over HTTP. The compared sides are measured in turn, and ratios are
medians of pairs. `python -m bench.prompt_times --help` lists parts, a short check, and a lock
for taking turns with other programs on the machine."""

from __future__ import annotations

from collections.abc import Callable

from bench.prompt_times.alone import alone
from bench.prompt_times.experts import experts
from bench.prompt_times.first_minute import first_minute
from bench.prompt_times.joins import joins, newcomer, shared_prefix
from bench.prompt_times.measuring import Options
from bench.prompt_times.peers import llama, percentiles

PARTS: dict[str, Callable[[Options], None]] = {
    "alone": alone,
    "llama": llama,
    "joins": joins,
    "newcomer": newcomer,
    "shared": shared_prefix,
    "percentiles": percentiles,
    "moe": experts,
    "first-minute": first_minute,
}


def prompts(model: str, runs: int) -> None:
    """Run all parts. Each has its own models, regardless of ``model``."""
    run_parts(tuple(PARTS), Options(runs=runs))


def run_parts(names: tuple[str, ...], options: Options) -> None:
    for name in names:
        print(f"\n### {name}: {options.runs} runs", flush=True)
        PARTS[name](options)
