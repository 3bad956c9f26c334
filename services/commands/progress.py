"""The progress display of a measurement on a terminal."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from services.measuring.load import LoadRecord


class _Said(ProgressColumn):
    """The text shown next to a bar."""

    def render(self, task: Task) -> Text:
        return Text(str(task.fields.get("said", "")))


class LoadBar:
    """The bar of one level of load."""

    def __init__(self, progress: Progress, title: str, total: int | None) -> None:
        self._progress, self._began = progress, time.perf_counter()
        self._task = progress.add_task(title, total=total, said="")
        self._tokens = self._failed = 0

    def add(self, record: LoadRecord) -> None:
        """Count a finished request."""
        self._tokens += record.answer.completion_tokens
        self._failed += record.answer.error is not None
        rate = self._tokens / (time.perf_counter() - self._began)
        failed = f", {self._failed} failed" if self._failed else ""
        self._progress.update(self._task, advance=1, said=f"{rate:.0f} tok/s{failed}")


@contextmanager
def progress_shown() -> Iterator[Progress]:
    """Show progress on stderr, if that is a terminal."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        _Said(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        yield progress
