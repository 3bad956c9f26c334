"""Logging of all processes, in one format with the name of the process on every line.

Text is ``HH:MM:SS level process: message``; JSON is one object per line. API keys, prompts and
generated texts are never logged.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import threading
import time
from collections.abc import Mapping
from typing import Literal, Protocol

LogFormat = Literal["text", "json"]

_LIBRARIES = (
    "httpx",
    "httpx2",
    "httpcore",
    "urllib3",
    "filelock",
    "fsspec",
    "huggingface_hub",
    "asyncio",
)
"""Libraries that log warnings and errors only."""

_TEXT_LINE = re.compile(r"\d\d:\d\d:\d\d (debug|info|warning|error|critical) \S+: ")


class LogStream(Protocol):
    """The destination of log lines."""

    def write(self, text: str, /) -> object: ...

    def flush(self) -> object: ...


def setup(process: str, level: str, format: LogFormat, stream: LogStream | None = None) -> None:
    """Send all log messages to ``stream`` (default: stderr), as lines of ``process``.

    A second call replaces the first. uvicorn's lines take the same route, except its access log.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_Formatter(process, format))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in _LIBRARIES:
        logging.getLogger(name).setLevel(max(root.level, logging.WARNING))
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
        logger.setLevel(max(root.level, logging.WARNING))
    logging.captureWarnings(True)


def format_line(process: str, level: str, message: str, format: LogFormat) -> str:
    """Return output that bypassed this module as a log line, without a line end.

    A line that already has the right format is returned unchanged.
    """
    if format == "text":
        if _TEXT_LINE.match(message):
            return message
        return f"{time.strftime('%H:%M:%S')} {level} {process}: {message}"
    if message.startswith('{"time": '):
        return message
    return _json(time.time(), level, process, message)


def event(
    logger: logging.Logger,
    level: int,
    message: str,
    fields: Mapping[str, object],
    parts: Mapping[str, object] | None = None,
) -> None:
    """Log ``message`` with ``fields``: as ``name=value`` after it, or as fields of the JSON object.

    ``parts`` are in the message, so they are fields of JSON only. Fields with the value None are
    omitted.
    """
    present = {name: value for name, value in fields.items() if value is not None}
    logger.log(level, "%s", message, extra={"fields": present, "parts": parts or {}})


class RateLimitedLogger:
    """Logs at most one warning per ``interval_s`` and drops the others.

    It keeps a peer that keeps sending invalid data from filling the log. Safe to use from any
    thread.
    """

    def __init__(self, logger: logging.Logger, interval_s: float = 60.0) -> None:
        self._logger = logger
        self._interval_s = interval_s
        self._next_at = float("-inf")
        self._lock = threading.Lock()

    def warning(self, message: str, *args: object) -> None:
        with self._lock:
            now = time.monotonic()
            if now < self._next_at:
                return
            self._next_at = now + self._interval_s
        self._logger.warning(message, *args)


class _Formatter(logging.Formatter):
    def __init__(self, process: str, format: LogFormat) -> None:
        super().__init__()
        self._process = process
        self._format = format

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        fields: dict[str, object] = getattr(record, "fields", {})
        trace = self.formatException(record.exc_info) if record.exc_info else None
        level = record.levelname.lower()
        if self._format == "json":
            return _json(
                record.created,
                level,
                self._process,
                message,
                logger=record.name,
                trace=trace,
                **getattr(record, "parts", {}),
                **fields,
            )
        if fields:
            message = " ".join([message, *(f"{name}={value}" for name, value in fields.items())])
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        head = f"{clock} {level} {self._process}: "
        lines = (message if trace is None else f"{message}\n{trace}").splitlines() or [""]
        return "\n".join(head + one for one in lines)


def _json(created: float, level: str, process: str, message: str, **more: object) -> str:
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(created))
    fields = {
        "time": f"{stamp}.{int(created % 1 * 1000):03d}Z",
        "level": level,
        "process": process,
        "message": message,
        **more,
    }
    present = {name: value for name, value in fields.items() if value is not None}
    return json.dumps(present, ensure_ascii=False)
