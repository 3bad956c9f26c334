"""Whitespace that models write around tool calls and reasoning."""

from __future__ import annotations


class WhitespaceBuffer:
    """Holds back whitespace until it is known to be part of an answer's text.

    It is text if more text follows, or if the answer has nothing else. Next to a tool call it is
    dropped: an API whose answers are lists of items would need an item for it.
    """

    def __init__(self) -> None:
        self._held = ""
        self._text_begun = False
        self._called = False

    @property
    def holds(self) -> bool:
        """Whether there is whitespace that may still be sent."""
        return bool(self._held)

    def feed(self, text: str) -> str:
        """Return the part of the text so far that can be sent now."""
        if self._text_begun:
            return text
        self._held += text
        if not self._held.strip():
            return ""
        self._text_begun = True
        shown, self._held = self._held, ""
        return shown

    def interrupt(self, *, call: bool) -> None:
        """Note that reasoning or a ``call`` comes next."""
        self._text_begun = False
        self._called |= call
        if self._called:
            self._held = ""

    def finish(self) -> str:
        """Return the remaining text at the end."""
        held, self._held = self._held, ""
        return "" if self._called else held
