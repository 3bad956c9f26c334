"""Reports of `bench serve` for which nothing was measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from services.commands.bench.report import LoadReport
from services.measuring.load import JoinRecord, LoadRecord
from services.measuring.measures import Level, level_of


def made_level(
    *records: LoadRecord, joins: Sequence[JoinRecord] = (), concurrency: int = 2, **fields: Any
) -> Level:
    """Return a level of two seconds."""
    fields = {"request_rate": None, "cancelled": 0, "limits": {}, **fields}
    return level_of(records, joins, concurrency=concurrency, duration_s=2.0, **fields)


def made_report(level: Level, **fields: Any) -> LoadReport:
    plain: dict[str, Any] = {"url": "http://h", "model": "m", "label": "m", "endpoint": "chat"}
    plain |= {"workload": "fixed", "options": {}, "seed": 1, "started": "", "version": ""}
    return LoadReport(**plain | fields, levels=[level])
