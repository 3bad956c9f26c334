"""One log stream from the output of several processes.

Children write into pipes, which threads read immediately; one thread writes to our own stream. A
paused terminal or a slow reader thus blocks neither children nor the supervisor: lines that do not
fit into the queue are dropped, and a line in the stream gives their number.
"""

from __future__ import annotations

import errno
import logging
import os
import queue
import re
import sys
import threading
import time
from collections.abc import Callable
from typing import IO

from shared import logs

_MAX_QUEUED_LINES = 20_000
_MAX_LINE_BYTES = 64 * 1024
_PROGRESS_EVERY_S = 2.0
_END_OF_LINE = re.compile(rb"[\r\n]")

logger = logging.getLogger("supervisor")


def announce(line: str) -> None:
    """Write ``line`` to stdout; to the log if stdout is closed or its disk is full."""
    try:
        sys.stdout.write(line)
        sys.stdout.flush()
    except OSError:
        logger.info("%s", line.strip())


class LogCollector:
    """Writes the lines of all processes in order of arrival.

    It is also the stream of the supervisor's own log.
    """

    def __init__(self, format: logs.LogFormat, stream: logs.LogStream | None = None) -> None:
        self._format = format
        self._stream = stream or sys.stderr
        self._lines: queue.Queue[str | None] = queue.Queue(_MAX_QUEUED_LINES)
        self._dropped = 0
        self._readers: list[threading.Thread] = []
        self._writer = threading.Thread(target=self._write_all, name="output", daemon=True)
        self._writer.start()

    def follow(self, pipe: IO[bytes], name: Callable[[], str]) -> None:
        """Read the output of the process ``name`` from ``pipe``, and close it at the
        end of file. Raises: OSError if there can be no further thread."""
        self._readers = [reader for reader in self._readers if reader.is_alive()]
        reader = threading.Thread(
            target=self._read_all, args=(pipe, name), name=f"output-{name()}", daemon=True
        )
        try:
            reader.start()
        except RuntimeError as error:
            pipe.close()
            raise OSError(errno.EAGAIN, str(error)) from None
        self._readers.append(reader)

    def write(self, text: str) -> None:
        try:
            self._lines.put_nowait(text)
        except queue.Full:
            self._dropped += 1

    def flush(self) -> None:
        """Do nothing: only `close` waits."""

    def close(self, timeout_s: float = 2.0) -> None:
        """Write the queued lines, as far as possible within ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        for reader in self._readers:
            reader.join(max(0.0, deadline - time.monotonic()))
        try:
            self._lines.put(None, timeout=max(0.01, deadline - time.monotonic()))
        except queue.Full:
            return
        self._writer.join(max(0.01, deadline - time.monotonic()))

    def _read_all(self, pipe: IO[bytes], name: Callable[[], str]) -> None:
        rest, shown = b"", 0.0
        with pipe:
            while data := os.read(pipe.fileno(), _MAX_LINE_BYTES):
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    self._emit(name(), line)
                # A progress bar returns to the start of its line and never ends it.
                if b"\r" in rest and time.monotonic() - shown > _PROGRESS_EVERY_S:
                    shown = time.monotonic()
                    self._emit(name(), rest)
                if len(rest) > _MAX_LINE_BYTES:
                    self._emit(name(), rest)
                    rest = b""
            self._emit(name(), rest)

    def _emit(self, process: str, raw: bytes) -> None:
        parts = [part for part in _END_OF_LINE.split(raw) if part.strip()]
        if parts:
            text = parts[-1].decode(errors="replace").rstrip()
            self.write(logs.format_line(process, "info", text, self._format) + "\n")

    def _write_all(self) -> None:
        while (text := self._lines.get()) is not None:
            if self._dropped:
                dropped, self._dropped = self._dropped, 0
                message = f"{dropped} lines were dropped, because the log was not read in time"
                warning = logs.format_line("supervisor", "warning", message, self._format)
                text = f"{warning}\n{text}"
            try:
                self._stream.write(text)
                self._stream.flush()
            except (OSError, ValueError):
                pass  # the reader is gone; the server continues without a log
