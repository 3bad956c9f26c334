"""The reports of a run, in a file, so that an interrupted run can be continued."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from zoo.examine import ArchitectureReport
from zoo.farm import Way


class _Line(msgspec.Struct, frozen=True):
    way: Way
    name: str
    report: ArchitectureReport | None
    """None: its module has no model."""


class Results:
    """Reports by way and architecture. Remove the file after a change of the code."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._found: dict[tuple[Way, str], ArchitectureReport | None] = {}
        if path is not None and path.exists():
            for encoded in path.read_bytes().splitlines():
                line = msgspec.json.decode(encoded, type=_Line)
                self._found[line.way, line.name] = line.report

    def missing(self, way: Way, names: Sequence[str]) -> list[str]:
        return [name for name in names if (way, name) not in self._found]

    def reports(self, way: Way, names: Sequence[str]) -> dict[str, ArchitectureReport]:
        found = ((name, self._found.get((way, name))) for name in names)
        return {name: report for name, report in found if report is not None}

    def add(self, way: Way, name: str, report: ArchitectureReport | None) -> None:
        self._found[way, name] = report
        if self._path is not None:
            with self._path.open("ab") as file:
                file.write(msgspec.json.encode(_Line(way, name, report)) + b"\n")
