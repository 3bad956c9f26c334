"""Tables of a page that take minutes to make: each stands between two comments of its name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def write_tables(path: Path, tables: Mapping[str, str]) -> None:
    """Write each table between its markers in the file ``path``."""
    text = path.read_text()
    for name, part in tables.items():
        begin, end = _markers(name)
        head, _, rest = text.partition(begin)
        text = f"{head}{begin}\n{part}\n{end}{rest.partition(end)[2]}"
    path.write_text(text)


def read_table(path: Path, name: str) -> str:
    """Return the table that is between its markers in the file ``path``."""
    begin, end = _markers(name)
    return path.read_text().partition(begin)[2].partition(end)[0]


def _markers(name: str) -> tuple[str, str]:
    return f"<!-- {name} -->\n", f"<!-- /{name} -->\n"
