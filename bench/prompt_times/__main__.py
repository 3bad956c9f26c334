"""`python -m bench.prompt_times [part ...]`."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from engine.backend.blas import load_fast_blas

load_fast_blas()  # before anything imports mlx

from bench.prompt_times import first_minute  # noqa: E402
from bench.prompt_times.alone import CASES  # noqa: E402
from bench.prompt_times.measuring import Options  # noqa: E402
from bench.prompt_times.parts import PARTS, run_parts  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.prompt_times", description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], help="default: all")
    parser.add_argument("--runs", type=int, default=3, help="alternating runs (default: 3)")
    parser.add_argument("--check", action="store_true", help="one run, short prompts")
    parser.add_argument("--lock", type=Path, help="a file to lock while something is timed")
    parser.add_argument(
        "--cases",
        default="",
        help=f"of 'alone': {','.join(CASES)}; of 'first-minute': {','.join(first_minute.CASES)}",
    )
    parser.add_argument("--chunks", default="", help="of 'alone': fixed lengths, in tokens")
    parser.add_argument(
        "--lengths", default="", help="of 'alone' and 'llama'; one for 'joins' and 'newcomer'"
    )
    parser.add_argument("--full", action="store_true", help="of 'joins': with a full cache")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that servers are stopped too
    options = Options(
        runs=1 if given.check else given.runs,
        check=given.check,
        lock=given.lock,
        cases=tuple(filter(None, given.cases.split(","))),
        lengths=tuple(map(int, filter(None, given.lengths.split(",")))),
        chunks=tuple(map(int, filter(None, given.chunks.split(",")))),
        full=given.full,
    )
    run_parts(tuple(given.parts or PARTS), options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
