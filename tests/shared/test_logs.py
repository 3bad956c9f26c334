"""The format of log lines."""

from __future__ import annotations

import io
import json
import logging
import re
import time
from collections.abc import Iterator

import pytest

from shared import logs


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)


def logged(format: logs.LogFormat, level: str = "info") -> io.StringIO:
    stream = io.StringIO()
    logs.setup("engine-0", level, format, stream)
    return stream


def log_an_exception(name: str) -> None:
    try:
        raise ValueError("broken")
    except ValueError:
        logging.getLogger(name).exception("two\nlines")


def test_every_line_of_text_names_its_process_and_level() -> None:
    stream = logged("text")
    logging.getLogger("engine.core").info("step %d", 3)
    log_an_exception("engine.core")
    first, *rest = stream.getvalue().splitlines()
    assert re.fullmatch(r"\d\d:\d\d:\d\d info engine-0: step 3", first)
    assert len(rest) > 3
    assert all(re.match(r"\d\d:\d\d:\d\d error engine-0: ", line) for line in rest)
    assert rest[-1].endswith("ValueError: broken")


def test_json_is_one_object_a_line() -> None:
    stream = logged("json")
    log_an_exception("a.b")
    (line,) = stream.getvalue().splitlines()
    fields = json.loads(line)
    assert fields["process"] == "engine-0"
    assert fields["level"] == "error"
    assert fields["message"] == "two\nlines"
    assert fields["trace"].endswith("ValueError: broken")


def test_only_warnings_of_libraries_are_logged() -> None:
    stream = logged("text")
    for name in ("httpx", "uvicorn.access", "uvicorn.error"):
        logging.getLogger(name).info("chatter")
        logging.getLogger(name).error("trouble")
    assert "chatter" not in stream.getvalue()
    assert stream.getvalue().count("trouble") == 3


def test_lines_below_the_level_are_not_logged() -> None:
    stream = logged("text", "warning")
    logging.getLogger("x").info("small talk")
    assert stream.getvalue() == ""


@pytest.mark.parametrize("format", ["text", "json"])
def test_a_formatted_line_is_not_formatted_again(format: logs.LogFormat) -> None:
    stream = logged(format)
    logging.getLogger("x").info("hello")
    line = stream.getvalue().rstrip("\n")
    assert logs.format_line("supervisor", "info", line, format) == line


def test_a_foreign_line_gets_the_name_of_its_process() -> None:
    text = logs.format_line("engine-0", "info", "Segmentation fault", "text")
    assert re.fullmatch(r"\d\d:\d\d:\d\d info engine-0: Segmentation fault", text)
    fields = json.loads(logs.format_line("engine-0", "info", "Segmentation fault", "json"))
    assert (fields["process"], fields["message"]) == ("engine-0", "Segmentation fault")


def test_a_rate_limited_logger_drops_what_comes_too_soon(caplog: pytest.LogCaptureFixture) -> None:
    limited = logs.RateLimitedLogger(logging.getLogger("x"), interval_s=0.5)
    for number in range(10):
        limited.warning("dropped %d", number)
    assert caplog.messages == ["dropped 0"]
    time.sleep(0.6)
    limited.warning("dropped %d", 10)
    assert caplog.messages == ["dropped 0", "dropped 10"]
