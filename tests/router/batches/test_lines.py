"""The lines of a file."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from router.batches.lines import MAX_BLANK_LINES, check_file, read_line, read_lines
from tests.router.batches.conftest import BatchClient, line


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
        assert raw is None or read_line(path, start) == raw


@pytest.mark.parametrize("blank", [b"\n", b" \r\n"])
def test_a_file_has_a_limited_number_of_blank_lines(tmp_path: Path, blank: bytes) -> None:
    path = tmp_path / "in.jsonl"
    lines = json.dumps(line("a")).encode() + b"\n"
    path.write_bytes(blank * MAX_BLANK_LINES + lines)
    checked = check_file(path, "/v1/completions", 10_000, threading.Event())
    assert checked is not None and checked.total == 1 and not checked.errors
    path.write_bytes(blank * (MAX_BLANK_LINES + 1) + lines)
    checked = check_file(path, "/v1/completions", 10_000, threading.Event())
    assert checked is not None
    (error,) = checked.errors
    assert (error.code, error.line) == ("too_many_lines", MAX_BLANK_LINES + 1)


def test_a_file_has_a_limited_number_of_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.batches.lines.MAX_LINES", 3)
    path = tmp_path / "in.jsonl"
    for count in (3, 4):
        lines = (json.dumps(line(str(number))) for number in range(count))
        path.write_text("\n".join(lines))
        checked = check_file(path, "/v1/completions", 10_000, threading.Event())
        assert checked is not None
        found = [(error.code, error.line) for error in checked.errors]
        assert found == ([] if count == 3 else [("too_many_lines", 4)])


def test_large_lines_are_answered(served: BatchClient) -> None:
    lines = [json.dumps(line(name)).replace("{", "{" + " " * 20_000, 1) for name in ("a", "b")]
    done = served.run("\n".join(lines).encode())
    assert (done.status, done.request_counts.completed) == ("completed", 2)
    assert [each["custom_id"] for each in served.lines(done.output_file_id)] == ["a", "b"]


@pytest.mark.parametrize("value", [b'"\xff"', b"1e999999", b"9" * 400])
@pytest.mark.parametrize("field", [b"model", b"stream"])
def test_what_cannot_be_decoded_in_a_body_is_an_error_of_its_line(
    served: BatchClient, tmp_path: Path, field: bytes, value: bytes
) -> None:
    content = json.dumps(line("a") | {"body": {"prompt": "hello", "_": 0}}).encode()
    content = content.replace(b'"_": 0', b'"%s": %s' % (field, value))
    path = tmp_path / "in.jsonl"
    path.write_bytes(content)
    checked = check_file(path, "/v1/completions", 10_000, threading.Event())
    assert checked is not None and not checked.errors and checked.model is None
    done = served.run(content)
    assert done.status == "completed" and done.request_counts.failed == 1
    (failed,) = served.lines(done.error_file_id)
    assert failed["response"]["status_code"] == 400
