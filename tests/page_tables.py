"""Tables of a page that take minutes to make: each stands between two comments of its name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def write_tables(path: Path, tables: Mapping[str, str]) -> None:
    """Write each table between its markers in the file ``path``."""
    text = path.read_text()
    for name, part in tables.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->\n"
        head, _, rest = text.partition(begin)
        text = f"{head}{begin}\n{part}\n{end}{rest.partition(end)[2]}"
    path.write_text(text)
