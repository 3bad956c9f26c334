"""``python -m engine.zoo``: examine architectures, print the results, write the page of them."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from engine.zoo.build import architectures
from engine.zoo.examine import ArchitectureReport
from engine.zoo.farm import GPU_PATH, TIME_LIMIT_S, examine_all
from engine.zoo.table import page, summary


def main() -> int:
    """Return 0 if all architectures that load are served right, else 1."""
    parser = argparse.ArgumentParser(prog="python -m engine.zoo", description=__doc__)
    parser.add_argument("names", nargs="*", help="architectures (default: all)")
    parser.add_argument("--write", type=Path, help="try both ways, write the table to this file")
    parser.add_argument("--time-limit", type=float, default=TIME_LIMIT_S, help="seconds for one")
    parser.add_argument(
        GPU_PATH, action="store_true", help="compute as on a GPU: its batches and slabs, look-ahead"
    )
    arguments = parser.parse_args()
    names = arguments.names or architectures()
    ways = (False, True) if arguments.write else (arguments.gpu_path,)
    by_way = {way: _examine(names, arguments.time_limit, gpu_path=way) for way in ways}
    if arguments.write:
        arguments.write.parent.mkdir(parents=True, exist_ok=True)
        arguments.write.write_text(page(list(by_way[False].values()), by_way[True]))
    reports = [report for each in by_way.values() for report in each.values()]
    return int(any(report.loads and not report.right for report in reports))


def _examine(
    names: Iterable[str], time_limit_s: float, *, gpu_path: bool
) -> dict[str, ArchitectureReport]:
    """Examine ``names`` one way, print the results, and return them by name."""
    started = time.perf_counter()
    reports: dict[str, ArchitectureReport] = {}
    print("as on a GPU" if gpu_path else "as on a CPU")  # noqa: T201
    for report in examine_all(names, time_limit_s, gpu_path=gpu_path):
        reports[report.name] = report
        print(_line(report), flush=True)  # noqa: T201
    print(f"{summary(list(reports.values()))}; {time.perf_counter() - started:.0f} s")  # noqa: T201
    return reports


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
