"""`python -m bench prompts`: how soon prompts have their first token, and what others feel of it.

Real servers are asked over HTTP. What is compared is measured in turn, and ratios are medians of
pairs. `python -m bench.prompt_times --help` has parts, a short check, and a lock to take turns with
other programs on the machine.
"""

from __future__ import annotations

from collections.abc import Callable

from bench.prompt_times.alone import alone
from bench.prompt_times.experts import experts
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
}


def prompts(model: str, runs: int) -> None:
    """Run all parts. Each has its own models, whatever ``model`` says."""
    run_parts(tuple(PARTS), Options(runs=runs))


def run_parts(names: tuple[str, ...], options: Options) -> None:
    for name in names:
        print(f"\n### {name}: {options.runs} runs", flush=True)
        PARTS[name](options)
