"""The lines of a file."""

from __future__ import annotations

import json
from pathlib import Path

from router.batches.lines import read_line, read_lines
from tests.router.batches.conftest import BatchClient, line
from tests.router.scripted_engine import ScriptedEngine


def test_a_line_is_the_same_when_it_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\n  [2] \n' + b"x" * 9000 + b"\nlast")
    found = list(read_lines(path, max_body_bytes=100))
    assert [(each.number, each.raw) for each in found] == [
        (1, b'{"a": 1}'),
        (3, b"[2]"),
        (4, None),
        (5, b"last"),
    ]
    for _, start, raw in found:
        assert raw is None or read_line(path, start, 100) == raw


def test_large_lines_are_answered(batches: BatchClient, engine: ScriptedEngine) -> None:
    lines = [json.dumps(line(name)).replace("{", "{" + " " * 20_000, 1) for name in ("a", "b")]
    done = batches.run("\n".join(lines).encode())
    assert (done.status, done.request_counts.completed) == ("completed", 2)
    assert [each["custom_id"] for each in batches.lines(done.output_file_id)] == ["a", "b"]
