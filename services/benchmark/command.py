"""`mlx-lm-server bench NAME`: hands over to the measurement of that name."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence

BENCHES = {
    "serve": "load on any server with OpenAI's API: tokens a second, first tokens, goodput",
    "step": "the executor alone, by rows of a batch and by tokens",
    "kv": "a prefix that is computed, in RAM, or on SSD",
    "plot": "one plot of several results of `bench serve --save`",
}
"""Name, which is that of a module here, and help."""


def main(argv: Sequence[str]) -> int:
    """Run the measurement that ``argv`` names; return its exit code."""
    name = parser().parse_args(argv[:1]).name
    code: int = importlib.import_module(f"services.benchmark.{name}").main(argv[1:])
    return code


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="mlx-lm-server bench",
        description="Measure. Each has a --help of its own; what figures mean is in docs/bench.md.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(f"  {name:<7}{help}" for name, help in BENCHES.items()),
    )
    made.add_argument("name", choices=list(BENCHES), metavar="NAME", help=", ".join(BENCHES))
    return made
