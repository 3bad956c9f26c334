"""``python -m zoo``: test architectures, print the results, write their docs page."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from zoo.build import architectures
from zoo.examine import ArchitectureReport
from zoo.farm import GPU_PATH, TIME_LIMIT_S, Way, examine_all
from zoo.results import Results
from zoo.table import RANKS, page, summary


def main() -> int:
    """Return 0 if all architectures that load are served correctly, else 1."""
    parser = argparse.ArgumentParser(prog="python -m zoo", description=__doc__)
    parser.add_argument("names", nargs="*", help="architectures (default: all)")
    parser.add_argument(
        "--write", type=Path, help="test all ways, and write the table to this file"
    )
    parser.add_argument(
        "--time-limit", type=float, default=TIME_LIMIT_S, help="timeout in seconds per architecture"
    )
    parser.add_argument(
        GPU_PATH, action="store_true", help="compute as on a GPU: its batches and pages, look-ahead"
    )
    parser.add_argument(
        "--ranks", type=int, default=1, help="divide models across this many processes"
    )
    parser.add_argument(
        "--results", type=Path, help="store reports in this file; continue with the missing ones"
    )
    options = parser.parse_args()
    names = options.names or architectures()
    ways = [Way(options.gpu_path, options.ranks)]
    if options.write:
        ways = [Way(), Way(gpu_path=True), Way(ranks=RANKS)]
    results = Results(options.results)
    by_way = {way: _examine(names, options.time_limit, way, results) for way in ways}
    if options.write:
        options.write.parent.mkdir(parents=True, exist_ok=True)
        options.write.write_text(page(by_way))
    reports = [report for each in by_way.values() for report in each.values()]
    return int(any(report.loads and not report.right for report in reports))


def _examine(
    names: Sequence[str], time_limit_s: float, way: Way, results: Results
) -> dict[str, ArchitectureReport]:
    """Test those of ``names`` that are missing in ``results``, print the results, and return all
    reports by name."""
    started = time.perf_counter()
    print(way.words)  # noqa: T201
    missing = results.missing(way, names)
    done = set()
    for report in examine_all(missing, time_limit_s, way):
        results.add(way, report.name, report)
        done.add(report.name)
        print(_line(report), flush=True)  # noqa: T201
    for name in missing:
        if name not in done:
            results.add(way, name, None)
    reports = results.reports(way, names)
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
