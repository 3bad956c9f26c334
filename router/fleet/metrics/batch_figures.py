"""What metrics, probes and the page show of batches."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from router.fleet.metrics.prometheus import Metrics

_HELP = {
    "unfinished": "Batches that have not ended",
    "lines": "Lines of unfinished batches",
    "lines_done": "Lines of unfinished batches that have an answer or an error",
    "running": "Lines of batches that run, or wait for a place in an engine",
}


@dataclass
class BatchFigures:
    """Kept up to date by `router.batches`. All are 0 without ``--batch-dir``."""

    unfinished: int = 0
    """Batches that have not ended."""
    lines: int = 0
    """Lines of these, as far as they have been counted."""
    lines_done: int = 0
    """Lines of these that have an answer or an error."""
    running: int = 0
    """Lines that run now, or wait for a place in an engine."""

    def add_gauges(self, metrics: Metrics) -> None:
        for name, help_ in _HELP.items():
            metrics.add_gauge(f"batches_{name}", help_, partial(getattr, self, name))
