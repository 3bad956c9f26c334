"""The peers' section of docs/benchmarks.md, and its pictures."""

from __future__ import annotations

import platform
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from bench.peers.cells import CELLS, OURS, Cell, Pair
from bench.peers.environments import Peer
from services.commands.bench.plot import plot
from services.commands.bench.report import LoadReport
from services.measuring.measures import Level

BEGIN, END = "<!-- peers -->", "<!-- /peers -->"
NAMES = {
    "fixed": "128 tokens in, 32 out",
    "mixed": "16 to 1,024 in, 16 to 64 out",
    "shared-prefix": "the same 600 tokens, then 32 of their own, 16 out",
    "multi-turn": "conversations of 3 turns of 64 in, 32 out",
    "long-join": "1,000 tokens join streams",
}
Measured = Mapping[Cell, Sequence[Pair]]
Value = Callable[[Level], float | None]


def write(
    path: Path,
    found: Mapping[Peer, Measured],
    versions: Mapping[Peer, str],
    reasons: Mapping[str, str],
) -> None:
    """Write the section between its marks in ``path``, and the pictures next to it."""
    pictures = path.parent / "pictures"
    for reads, name in (("demo-fp32", "peers"), ("demo-4bit", "peers-codes")):
        peers = [peer for peer in found if peer.reads == reads]
        if peers:
            draw({peer: found[peer] for peer in peers}, pictures / f"{name}.png")
    text = path.read_text(encoding="utf-8")
    section = "\n".join([BEGIN, *_lines(found, versions, reasons), END])
    changed = re.sub(f"{BEGIN}.*?{END}", lambda _: section, text, flags=re.DOTALL)
    path.write_text(changed, encoding="utf-8")


def draw(found: Mapping[Peer, Measured], path: Path) -> None:
    """Draw the levels of `fixed`, a line for each server."""
    fixed = [cell for cell in CELLS if cell.workload == "fixed"]
    of_ours = {
        cell: [pair.ours for pairs in found.values() for pair in pairs.get(cell, ())]
        for cell in fixed
    }
    reports = [_joined(OURS, of_ours)]
    for peer, cells in found.items():
        theirs = {cell: [pair.theirs for pair in cells.get(cell, ())] for cell in fixed}
        reports.append(_joined(peer.name, theirs))
    plot(reports, path, f"{NAMES['fixed']} ({next(iter(found)).reads})")


def _joined(label: str, cells: Mapping[Cell, Sequence[LoadReport]]) -> LoadReport:
    """Return one report of all levels, each from the run with the median rate."""
    levels, some = [], None
    for runs in cells.values():
        if runs:
            ordered = sorted(runs, key=lambda each: each.levels[0].output_throughput)
            some = ordered[(len(ordered) - 1) // 2]
            levels.append(some.levels[0])
    assert some is not None
    return LoadReport(
        **{name: getattr(some, name) for name in some.__struct_fields__}
        | {"label": label, "levels": levels}
    )


def _lines(
    found: Mapping[Peer, Measured], versions: Mapping[Peer, str], reasons: Mapping[str, str]
) -> Iterator[str]:
    runs = max(len(pairs) for each in found.values() for pairs in each.values())
    yield f"On {machine()}. Ours / theirs = ratio, medians of at most {runs} pairs in turn."
    yield "**Bold** is where we are behind."
    yield ""
    yield "| server | versions | weights |"
    yield "|---|---|---|"
    for peer in found:
        computed = f", {' '.join(peer.flags)}" if peer.flags else ""
        yield f"| {peer.name} | {versions[peer]} | `{peer.reads}{computed}` |"
    for title, workloads, value, is_better_high in _TABLES:
        cells = sorted(
            {cell for each in found.values() for cell in each if cell.workload in workloads},
            key=lambda cell: (list(NAMES).index(cell.workload), cell.clients),
        )
        if not cells:
            continue
        yield from ("", f"{title}:", "")
        yield f"| workload | clients | {' | '.join(peer.name for peer in found)} |"
        yield f"|---|---|{'---|' * len(found)}"
        for cell in cells:
            shown = (_compared(found[peer].get(cell, ()), value, is_better_high) for peer in found)
            yield f"| {NAMES[cell.workload]} | {cell.clients} | {' | '.join(shown)} |"
    failures = [
        f"* {server}, {NAMES[cell.workload]}, {cell.clients} clients: {count} of its requests "
        f"failed with {name}."
        for peer, each in found.items()
        for cell, pairs in each.items()
        for pair in pairs
        for server, report in ((peer.name, pair.theirs), (f"{OURS} beside {peer.name}", pair.ours))
        for name, count in report.levels[0].errors.items()
    ]
    if failures:
        yield from ("", *failures)
    if reasons:
        yield ""
        for name, reason in reasons.items():
            yield f"* {name} did not run here, or not to the end: `{reason}`"


def _compared(pairs: Sequence[Pair], value: Value, is_better_high: bool) -> str:
    values = [
        (mine, theirs)
        for pair in pairs
        if (mine := value(pair.ours.levels[0])) and (theirs := value(pair.theirs.levels[0]))
    ]
    if not values:
        return "-"
    mine, theirs = (statistics.median(side) for side in zip(*values, strict=True))
    ratio = statistics.median(a / b for a, b in values)
    is_ahead = ratio > 1 if is_better_high else ratio < 1
    shown = f"{_number(mine)} / {_number(theirs)} = {ratio:.2f}"
    return shown if is_ahead else f"**{shown}**"


def _number(value: float) -> str:
    return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def _ttft(level: Level) -> float | None:
    return level.ttft_ms.p50 / 1000 if level.ttft_ms else None


def _gap(level: Level) -> float | None:
    gap = level.join and level.join.longest_gap_ms
    return gap.max / 1000 if gap else None


def _joiner(level: Level) -> float | None:
    ttft = level.join and level.join.ttft_ms
    return ttft.p50 / 1000 if ttft else None


_TABLES: tuple[tuple[str, tuple[str, ...], Value, bool], ...] = (
    (
        "Tokens generated a second (more is better)",
        ("fixed", "mixed", "shared-prefix", "multi-turn"),
        lambda level: level.output_throughput,
        True,
    ),
    (
        "Seconds to the first token, median (less is better)",
        ("fixed", "mixed", "shared-prefix", "multi-turn"),
        _ttft,
        False,
    ),
    (
        "The longest time without a token of a running stream, in seconds",
        ("long-join",),
        _gap,
        False,
    ),
    ("Seconds to the first token of the prompt that joins", ("long-join",), _joiner, False),
)


def machine() -> str:
    """Return a description of this machine."""
    name, cores = platform.processor() or platform.machine(), 0
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        text = cpuinfo.read_text()
        cores = text.count("processor\t")
        if match := re.search(r"model name\s*: (.*)", text):
            name = match[1]
    system = "macOS" if platform.system() == "Darwin" else platform.system()
    return f"{f'{cores} cores of ' if cores else ''}{name}, {system}"
