"""Where the text of `/infill` ends, besides its end tokens and stop strings."""

from __future__ import annotations

import time
from collections.abc import Callable

from router.tokens.reply_parser import PlainReplyParser, ReplyDelta


class LimitedReplyParser(PlainReplyParser):
    """A `ReplyParser` that ends the text ``max_s`` after its first token, once it has a line end;
    and before a line that begins with fewer than ``min_indent`` spaces and tabs. The first line is
    the rest of the one with the cursor. (llama.cpp's ``t_max_predict_ms`` and ``n_indent``.)"""

    def __init__(
        self,
        max_s: float | None,
        min_indent: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self._max_s = max_s
        self._min_indent = min_indent
        self._clock = clock
        self._began: float | None = None
        self._has_line = False
        self._indent: int | None = None
        """The spaces and tabs of a line so far; None: after them, or in the first line."""
        self.complete = False

    def feed(self, text: str) -> list[ReplyDelta]:
        if self.complete:
            return []
        now = self._clock()
        self._began = now if self._began is None else self._began
        text = self._until_end(text)
        self._has_line |= "\n" in text
        is_late = self._max_s is not None and now - self._began > self._max_s
        self.complete |= is_late and self._has_line
        return super().feed(text)

    def _until_end(self, text: str) -> str:
        """Return ``text`` up to where a line has too little indentation."""
        if not self._min_indent:
            return text
        for place, char in enumerate(text):
            if self._indent is not None and char in " \t":
                self._indent += 1
            elif self._indent is not None and self._indent < self._min_indent:
                self.complete = True
                return text[:place]
            else:
                self._indent = 0 if char == "\n" else None
        return text


class SilentReplyParser(PlainReplyParser):
    """A `ReplyParser` of an answer that is not shown."""

    def feed(self, text: str) -> list[ReplyDelta]:
        return []
