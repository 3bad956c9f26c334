"""The lines of a batch's file, and their validation before any of them runs."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import Raw, Struct

from router.batches.objects import BatchError

MAX_LINES = 50_000
"""OpenAI's limit."""
MAX_BLANK_LINES = 50_000
"""A file of nothing else would take minutes of Python's time, which all threads share."""
MAX_ID_CHARS = 512
_MAX_ERRORS = 50
_ENVELOPE_BYTES = 4096
"""Max size of a line in addition to its body."""
_BOM = b"\xef\xbb\xbf"
_REST_EVERY_BYTES = 256 * 1024
"""The JSON decoder lets no other thread run: after this much, pause for longer than it took, like
`router.tokens.work_pool`."""


class FoundLine(NamedTuple):
    """A line of a file."""

    number: int
    """Counted from 1."""
    start: int
    """The offset in the file, in bytes."""
    raw: bytes | None
    """None if it is too long; then it is not read into memory. Empty for a blank line, which is
    found only after too many others."""


class InputLine(Struct, frozen=True):
    custom_id: str
    body: Raw
    method: str
    url: str


class _Model(Struct, frozen=True):
    model: Any = None


class Checked(Struct, frozen=True):
    """The result of validating a file. It is valid if there are no ``errors``."""

    total: int
    errors: list[BatchError]
    model: str | None


def read_lines(path: Path, max_body_bytes: int) -> Iterator[FoundLine]:
    """Yield each nonempty line, and blank ones after the first `MAX_BLANK_LINES`. Raises
    OSError."""
    limit = max_body_bytes + _ENVELOPE_BYTES
    number = start = following = blank = 0
    with path.open("rb") as file:
        while line := file.readline(limit + 1):
            number += 1
            start, following = following, following + len(line)
            is_cut = len(line) > limit and not line.endswith(b"\n")
            while is_cut and (rest := file.readline(limit)):
                following += len(rest)
                if rest.endswith(b"\n"):
                    break
            if is_cut:
                yield FoundLine(number, start, None)
            elif (stripped := _stripped(line, start)) or blank >= MAX_BLANK_LINES:
                yield FoundLine(number, start, stripped)
            else:
                blank += 1


def read_line(path: Path, start: int) -> bytes:
    """Return the line that begins at ``start``, like `read_lines`. Raises OSError."""
    with path.open("rb") as file:
        file.seek(start)
        return _stripped(file.readline(), start)


def _stripped(line: bytes, start: int) -> bytes:
    return (line if start else line.removeprefix(_BOM)).strip()


def unfinished_lines(path: Path, done: Sequence[int]) -> Iterator[FoundLine]:
    """Yield the lines of a file that was checked, except those numbered in ``done``, which is
    sorted. Lines longer than the limit, which may have been larger when the file was checked, are
    refused when they run. Raises OSError."""
    place = 0
    for line in read_lines(path, path.stat().st_size):
        if place < len(done) and done[place] == line.number:
            place += 1
        elif line.raw:
            yield line


class InvalidLine(ValueError):
    """A line is not a request; the message is the reason."""


def parse_line(raw: bytes) -> InputLine:
    """Return a line. Raises `InvalidLine`."""
    try:
        return msgspec.json.decode(raw, type=InputLine)
    except msgspec.ValidationError as error:
        raise InvalidLine(f"This is not a batch request: {error}.") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidLine(f"This is not a line of JSON in UTF-8: {error}.") from None


def check_file(
    path: Path, endpoint: str, max_body_bytes: int, stopped: threading.Event
) -> Checked | None:
    """Return the content of ``path``, with requests for ``endpoint``; None if ``stopped`` in the
    meantime.

    Takes long, and pauses in between. Raises OSError."""
    errors: list[BatchError] = []
    seen: set[bytes] = set()
    model: str | None = None
    total = read = 0
    began = time.monotonic()
    for number, _, raw in read_lines(path, max_body_bytes):
        total += 1
        if total > MAX_LINES:
            errors.append(
                _error("too_many_lines", f"There are more than {MAX_LINES} lines.", number)
            )
            break
        if raw == b"":
            message = f"There are more than {MAX_BLANK_LINES} blank lines."
            errors.append(_error("too_many_lines", message, number))
            break
        found = _check_line(raw, endpoint, number, seen, max_body_bytes)
        if isinstance(found, BatchError):
            errors.append(found)
            if len(errors) >= _MAX_ERRORS:
                break
        elif total == 1:
            model = _model_of(found)
        read += len(raw or b"")
        if read >= _REST_EVERY_BYTES or not total % 1000:
            if stopped.wait(2 * (time.monotonic() - began)):
                return None
            read, began = 0, time.monotonic()
    if not total:
        errors.append(_error("empty_file", "The file is empty.", None))
    return Checked(total, errors, model)


def _check_line(
    raw: bytes | None, endpoint: str, number: int, seen: set[bytes], max_body_bytes: int
) -> InputLine | BatchError:
    if raw is None:
        message = f"The body of a request is limited to {max_body_bytes} bytes."
        return _error("line_too_long", message, number)
    try:
        line = parse_line(raw)
    except ValueError as error:
        return _error("invalid_json_line", str(error), number)
    if not 1 <= len(line.custom_id) <= MAX_ID_CHARS:
        message = f"'custom_id' must have 1 to {MAX_ID_CHARS} characters."
        return _error("invalid_custom_id", message, number, "custom_id")
    digest = hashlib.blake2b(line.custom_id.encode("utf-8", "surrogatepass"), digest_size=16)
    if digest.digest() in seen:
        message = f"'custom_id' is already used by an earlier line: {line.custom_id[:64]}"
        return _error("duplicate_custom_id", message, number, "custom_id")
    seen.add(digest.digest())
    if line.method != "POST":
        return _error("invalid_method", "'method' must be POST.", number, "method")
    if line.url != endpoint:
        message = f"'url' must be {endpoint}, the endpoint of the batch."
        return _error("invalid_url", message, number, "url")
    if not bytes(line.body).startswith(b"{"):
        return _error("invalid_body", "'body' must be an object.", number, "body")
    return line


def _model_of(line: InputLine) -> str | None:
    try:
        found = msgspec.json.decode(line.body, type=_Model).model
    except (msgspec.MsgspecError, UnicodeDecodeError):  # such as a number that is too large
        return None  # the line itself will get the error
    return found[:MAX_ID_CHARS] if isinstance(found, str) else None


def _error(code: str, message: str, line: int | None, param: str | None = None) -> BatchError:
    return BatchError(code=code, message=message, line=line, param=param)
