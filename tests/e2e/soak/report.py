"""The report of `tests.e2e.soak`."""

from __future__ import annotations

import statistics
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

GROWTH, GROWTH_BYTES = 0.05, 8 * 2**20
"""Allowed growth of the median memory of a process from the second third of the run to the last.
The first third is not compared: caches, heaps and the kvstore fill up in it."""
MORE_FILES = 16
"""Allowed growth of the open files of an idle process since the first pause."""


@dataclass
class Report:
    """The results of a run."""

    seconds: float
    # Violations of what must hold, each once; empty after a good run.
    findings: list[str] = field(default_factory=list)
    # Requests by kind, answers and refusals.
    counts: Counter[str] = field(default_factory=Counter)
    # Process -> its resident bytes at each sample.
    memory: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    # Process -> its open files at each pause.
    files: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))

    def add_finding(self, finding: str) -> None:
        if finding not in self.findings and len(self.findings) < 50:
            self.findings.append(finding)
            print_line(f"WRONG: {finding}")

    def lines(self) -> list[str]:
        counts = ", ".join(f"{count} {name}" for name, count in sorted(self.counts.items()))
        lines = [f"{self.seconds / 60:.1f} min: {counts}"]
        for name, sizes in self.memory.items():
            first, second, last = (statistics.median(third) / 2**20 for third in thirds(sizes))
            open_files = self.files.get(name)
            files = f", open files {open_files[0]} -> {open_files[-1]}" if open_files else ""
            lines.append(
                f"{name:20} {first:6.1f} {second:6.1f} {last:6.1f} MB, median of each third{files}"
            )
        return lines + [f"WRONG: {finding}" for finding in self.findings]


def thirds(sizes: list[int]) -> tuple[list[int], list[int], list[int]]:
    """Split the samples into three parts, none of them empty."""
    cut = max(1, len(sizes) // 3)
    return sizes[:cut], sizes[cut : 2 * cut] or sizes, sizes[2 * cut :] or sizes


def grows(sizes: list[int], slack_bytes: int = GROWTH_BYTES) -> bool:
    """Return whether the last third of the samples is above the second by more than allowed."""
    _, second, last = (statistics.median(third) for third in thirds(sizes))
    return last > second * (1 + GROWTH) + slack_bytes


def open_files(pid: int) -> int:
    """Return the number of files that a process has open, or 0 where there is no /proc (macOS)."""
    directory = Path(f"/proc/{pid}/fd")
    return len(list(directory.iterdir())) if directory.is_dir() else 0


def print_line(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
