"""`mlx-lm-server bench plot`, and plots of measurements with matplotlib, which is an extra."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from services.commands.bench.report import LoadReport, load_name, read_report
from services.commands.parser import CommandParser
from services.measuring.measures import Distribution, Level
from shared.exits import EXIT_FAILED, EXIT_OK, fail

PROG = "mlx-lm-server bench plot"
FORMATS = (".svg", ".png", ".pdf")
MISSING = "--plot: matplotlib is not installed: install the extra 'bench'"
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Colours by Okabe and Ito, which most colour-blind people can distinguish."""
MARKERS = "osD^vPX"
_PANEL_INCHES = (4.2, 3.4)

Value = Callable[[Level], float | None]


class PlotFailed(Exception):
    """The message is one line for the user."""


def main(argv: Sequence[str]) -> int:
    """Plot several results of `bench serve`; return the exit code."""
    options = make_parser().parse_args(argv)
    try:
        plot([read_report(path) for path in options.results], options.plot, options.title)
    except (PlotFailed, OSError, ValueError) as error:
        return fail(PROG, error, EXIT_FAILED)
    return EXIT_OK


def make_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog=PROG, description="Plot results of `bench serve --save`, with one line per --label."
    )
    parser.add_argument("results", nargs="+", type=Path, metavar="FILE", help="result files")
    parser.add_argument(
        "--plot", type=Path, required=True, metavar="FILE", help="output file: .svg, .png or .pdf"
    )
    parser.add_argument("--title", default="", help="title (default: workload and model)")
    return parser


def check_plot(path: Path) -> None:
    """Raise `PlotFailed` if no plot can be written to ``path``."""
    if path.suffix not in FORMATS:
        raise PlotFailed(f"--plot: {path} must end with one of {', '.join(FORMATS)}")
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        raise PlotFailed(MISSING) from None


def plot(reports: Sequence[LoadReport], path: Path, title: str = "") -> None:
    """Plot the levels of ``reports``, a line for each, to a file whose format follows from its
    name."""
    check_plot(path)
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = (
        "mlx-lm-server"  # the same results always give the same file
    )
    from matplotlib import pyplot

    panels = _join_panels() if any(_joins(each) for each in reports) else _panels(reports)
    width, height = _PANEL_INCHES
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(width * len(panels), height), squeeze=False, layout="constrained"
    )
    for axis, (name, value) in zip(axes[0], panels, strict=True):
        _draw(axis, reports, name, value)
    handles, labels = axes[0][0].get_legend_handles_labels()
    if len(reports) > 1:
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.suptitle(title or f"{reports[0].workload}: {reports[0].model}", fontsize=11)
    pyplot.close(figure)
    metadata = {"Date": None} if path.suffix == ".svg" else {}
    try:
        figure.savefig(path, dpi=110, metadata=metadata)
    except OSError as error:
        raise PlotFailed(f"--plot: {path}: {error.strerror}") from None


def _panels(reports: Sequence[LoadReport]) -> list[tuple[str, Value]]:
    panels: list[tuple[str, Value]] = [
        ("generated tokens per second", lambda level: level.output_throughput),
        ("TTFT, median, ms", lambda level: _p50(level.ttft_ms)),
        ("TPOT, median, ms", lambda level: _p50(level.tpot_ms)),
        ("ITL, 99th percentile, ms", lambda level: _p99(level.itl_ms)),
    ]
    if any(level.goodput is not None for report in reports for level in report.levels):
        panels.append(("good requests per second", lambda level: level.goodput))
    return panels


def _join_panels() -> list[tuple[str, Value]]:
    return [
        (
            "longest gap of running streams, median, ms",
            lambda level: _p50(level.join.longest_gap_ms) if level.join else None,
        ),
        (
            "TTFT of the joining request, median, ms",
            lambda level: _p50(level.join.ttft_ms) if level.join else None,
        ),
    ]


def _draw(axis: Any, reports: Sequence[LoadReport], name: str, value: Value) -> None:
    is_open = any(level.concurrency is None for each in reports for level in each.levels)
    most = 0.0
    for number, report in enumerate(reports):
        points = [
            (level.request_rate if is_open else level.concurrency, found)
            for level in report.levels
            if (found := value(level)) is not None and level.completed
        ]
        most = max([most, *(y for _, y in points)])
        axis.plot(
            [x for x, _ in points],
            [y for _, y in points],
            color=COLORS[number % len(COLORS)],
            marker=MARKERS[number % len(MARKERS)],
            markersize=5,
            linewidth=1.8,
            label=report.label,
        )
    levels = {
        (level.request_rate if is_open else level.concurrency) or 0: load_name(level)
        for report in reports
        for level in report.levels
    }
    axis.set_title(name, fontsize=10)
    axis.set_xlabel("requests per second" if is_open else "concurrent clients", fontsize=9)
    if len(levels) > 1 and min(levels) > 0:
        axis.set_xscale("log", base=2)
    axis.set_xticks(list(levels), list(levels.values()))
    axis.minorticks_off()
    smallest = min((y for line in axis.lines for y in line.get_ydata()), default=0)
    if smallest > 0 and most > 30 * smallest:
        axis.set_yscale("log")
    else:
        axis.set_ylim(bottom=0)
    axis.tick_params(labelsize=8)
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)


def _joins(report: LoadReport) -> bool:
    return any(level.join is not None for level in report.levels)


def _p50(ms: Distribution | None) -> float | None:
    return None if ms is None else ms.p50


def _p99(ms: Distribution | None) -> float | None:
    return None if ms is None else ms.p99
