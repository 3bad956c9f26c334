"""``python -m engine.zoo``: examine architectures, print the results, write the page of them."""

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
    """Return 0 if all architectures that load are served right, else 1."""
    parser = argparse.ArgumentParser(prog="python -m engine.zoo", description=__doc__)
    parser.add_argument("names", nargs="*", help="architectures (default: all)")
    parser.add_argument("--write", type=Path, help="write the table to this file")
    parser.add_argument("--time-limit", type=float, default=TIME_LIMIT_S, help="seconds for one")
    arguments = parser.parse_args()
    started = time.perf_counter()
    reports: list[ArchitectureReport] = []
    for report in examine_all(arguments.names or architectures(), arguments.time_limit):
        reports.append(report)
        print(_line(report), flush=True)  # noqa: T201
    print(f"{summary(reports)}; {time.perf_counter() - started:.0f} s")  # noqa: T201
    if arguments.write:
        arguments.write.parent.mkdir(parents=True, exist_ok=True)
        arguments.write.write_text(page(reports))
    return int(any(report.loads and not report.right for report in reports))


def _line(report: ArchitectureReport) -> str:
    how = report.batching + (", prefix" if report.prefix_cache else "")
    verdict = "right" if report.right else "WRONG" if report.loads else "does not load"
    why = report.error or "; ".join(filter(None, (report.reason, report.unquantized)))
    return (
        f"{report.name:22} {verdict:14} {how:19} {report.difference:8.1e} "
        f"{report.int8_difference:8.1e} {report.seconds:5.1f} s  {why}"
    )


if __name__ == "__main__":
    sys.exit(main())
