"""Text that is nothing but blank space, as templates have it around calls and reasoning."""

from __future__ import annotations


class WhitespaceBuffer:
    """Holds blank text back until it is clear whether it belongs to an answer's text: it does
    where text follows, or where nothing else is said. Beside a call it does not: an API
    whose answers are lists of items would have to make an item of it."""

    def __init__(self) -> None:
        self._held = ""
        self._text_begun = False
        self._called = False

    def feed(self, text: str) -> str:
        """What of the text so far can be shown now."""
        if self._text_begun:
            return text
        self._held += text
        if not self._held.strip():
            return ""
        self._text_begun = True
        shown, self._held = self._held, ""
        return shown

    def interrupt(self, *, call: bool) -> None:
        """Something else comes: a call, or reasoning."""
        self._text_begun = False
        self._called |= call
        if self._called:
            self._held = ""

    def finish(self) -> str:
        """What is left at the end."""
        held, self._held = self._held, ""
        return "" if self._called else held
