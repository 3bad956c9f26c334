"""The figures of batches in metrics, probes and the page."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from router.fleet.metrics.prometheus import Metrics

_HELP = {
    "unfinished": "Unfinished batches",
    "lines": "Lines of unfinished batches",
    "lines_done": "Lines of unfinished batches that have a result",
    "running": "Lines of batches that are running or queued at an engine",
}


@dataclass
class BatchFigures:
    """Updated by `router.batches`. All are 0 without ``--batch-dir``."""

    unfinished: int = 0
    """Unfinished batches."""
    lines: int = 0
    """Their lines, as far as counted."""
    lines_done: int = 0
    """Their lines with an answer or an error."""
    running: int = 0
    """Lines that are running or queued at an engine."""

    def add_gauges(self, metrics: Metrics) -> None:
        for name, help_ in _HELP.items():
            metrics.add_gauge(f"batches_{name}", help_, partial(getattr, self, name))
