"""``python -m engine.zoo``: examines architectures, prints what it finds, may write the page."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from engine.zoo.build import architectures
from engine.zoo.examine import ArchitectureReport
from engine.zoo.farm import TIME_LIMIT_S, examine_all
from engine.zoo.table import page, summary


def main() -> int:
    """0 when all that load are served right, else 1."""
    parser = argparse.ArgumentParser(prog="python -m engine.zoo", description=__doc__)
    parser.add_argument("names", nargs="*", help="architectures (default: all)")
    parser.add_argument("--write", type=Path, help="write the table to this file")
    parser.add_argument("--time-limit", type=float, default=TIME_LIMIT_S, help="seconds for one")
    arguments = parser.parse_args()
    started = time.perf_counter()
    found: list[ArchitectureReport] = []
    for finding in examine_all(arguments.names or architectures(), arguments.time_limit):
        found.append(finding)
        print(_line(finding), flush=True)  # noqa: T201
    print(f"{summary(found)}; {time.perf_counter() - started:.0f} s")  # noqa: T201
    if arguments.write:
        arguments.write.parent.mkdir(parents=True, exist_ok=True)
        arguments.write.write_text(page(found))
    return int(any(finding.loads and not finding.right for finding in found))


def _line(finding: ArchitectureReport) -> str:
    how = finding.batching + (", prefix" if finding.prefix_cache else "")
    verdict = "right" if finding.right else "WRONG" if finding.loads else "does not load"
    why = finding.error or "; ".join(filter(None, (finding.reason, finding.unquantized)))
    return (
        f"{finding.name:22} {verdict:14} {how:19} {finding.difference:8.1e} "
        f"{finding.int8_difference:8.1e} "
        f"{finding.seconds:5.1f} s  {why}"
    )


if __name__ == "__main__":
    sys.exit(main())
