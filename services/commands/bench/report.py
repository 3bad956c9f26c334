"""The report of a server measurement, as JSON and as a table."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from services.commands.admin_client import table
from services.measuring.measures import Distribution, Level
from services.measuring.workloads import Endpoint, WorkloadName


class LoadReport(msgspec.Struct, frozen=True, kw_only=True):
    """One run of `bench serve`."""

    url: str
    model: str
    label: str
    endpoint: Endpoint
    workload: WorkloadName
    options: dict[str, Any]
    seed: int
    started: str  # ISO 8601, UTC
    version: str
    levels: list[Level]

    def encode(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"


def read_report(path: Path) -> LoadReport:
    """Raises OSError, and ValueError if the file has other content."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=LoadReport)
    except msgspec.DecodeError as error:
        raise ValueError(f"{path} is not a result of `bench serve`: {error}") from None


def text_of(report: LoadReport) -> str:
    """Return the tables of a report."""
    lines = [
        f"{report.workload}: {report.model} at {report.url}, seed {report.seed}; "
        "TTFT, TPOT, ITL, E2EL in ms",
        table(list(_rows(report))),
    ]
    groups = list(_group_rows(report))
    if len(groups) > 1:
        lines += ["", "TTFT by kind of request, in ms", table(groups)]
    joins = list(_join_rows(report))
    if len(joins) > 1:
        lines += ["", "a long prompt joins running streams (ms)", table(joins)]
    lines += _error_lines(report)
    return "\n".join(lines)


def load_name(level: Level) -> str:
    """Return the load of ``level``: clients, or requests per second."""
    if level.concurrency is not None:
        return str(level.concurrency)
    return f"{level.request_rate:g}/s"


def _rows(report: LoadReport) -> Iterator[list[object]]:
    has_goodput = any(level.goodput is not None for level in report.levels)
    yield [
        *("LOAD", "OK", "FAILED", "S", "REQ/S", "TOK/S", "TTFT p50", "p99", "TPOT p50", "p99"),
        *("ITL p50", "p99", "E2EL p50", "p99", "CACHED"),
        *(["GOOD REQ/S"] if has_goodput else []),
    ]
    for level in report.levels:
        yield [
            *(load_name(level), level.completed, level.failed, f"{level.duration_s:.1f}"),
            *(f"{level.request_throughput:.2f}", f"{level.output_throughput:.1f}"),
            *_two(level.ttft_ms),
            *_two(level.tpot_ms),
            *_two(level.itl_ms),
            *_two(level.e2el_ms),
            _share(level.cached_tokens, level.input_tokens),
            *([f"{level.goodput or 0:.2f}"] if has_goodput else []),
        ]


def _group_rows(report: LoadReport) -> Iterator[list[object]]:
    yield ["LOAD", "REQUESTS", "COUNT", "p50", "p90", "p99", "CACHED"]
    for level in report.levels:
        for name, group in level.groups.items():
            ms = group.ttft_ms
            cached = _share(group.cached_tokens, group.input_tokens)
            times = (f"{each:.0f}" for each in (ms.p50, ms.p90, ms.p99))
            yield [load_name(level), name, ms.count, *times, cached]


def _join_rows(report: LoadReport) -> Iterator[list[object]]:
    yield ["STREAMS", "LONGEST GAP p50", "max", "JOINER'S TTFT p50", "ALONE p50"]
    for level in report.levels:
        if (join := level.join) is not None:
            gap = join.longest_gap_ms
            yield [
                load_name(level),
                *((f"{gap.p50:.0f}", f"{gap.max:.0f}") if gap else (None, None)),
                _two(join.ttft_ms)[0],
                _two(join.ttft_alone_ms)[0],
            ]


def _error_lines(report: LoadReport) -> Iterator[str]:
    for level in report.levels:
        for name, count in level.errors.items():
            said = f": {level.details[name]}" if level.details.get(name) else ""
            yield f"load {load_name(level)}: {count} failed with {name}{said}"
        if level.cancelled:
            yield f"load {load_name(level)}: {level.cancelled} cut when the measurement ended"
        if not level.has_usage:
            yield f"load {load_name(level)}: no usage was sent; tokens are events"


def _two(ms: Distribution | None) -> tuple[object, object]:
    return (None, None) if ms is None else (f"{ms.p50:.0f}", f"{ms.p99:.0f}")


def _share(part: int, whole: int) -> str | None:
    return f"{part / whole:.0%}" if whole else None
