"""Text between markers, without the whitespace that separates it from them."""

from __future__ import annotations


class WhitespaceTrimmer:
    """Drops whitespace at the start and end of a text next to a marker, because templates add or
    remove it there. ``at_marker``: whether a marker precedes the text."""

    def __init__(self, *, at_marker: bool = False) -> None:
        self._at_marker = at_marker
        self._shown = False
        self._space: list[str] = []  # held back: whitespace at the end of the text

    @property
    def blank(self) -> bool:
        """Whether there was only whitespace since the last marker."""
        return self._at_marker or not self._shown

    def feed(self, text: str) -> str:
        """Return the text that is final now."""
        if not text or text.isspace():
            self._space.append(text)
            return ""
        text = "".join([*self._space, text])
        visible = text.rstrip()
        self._space = [text[len(visible) :]]
        if self._at_marker and not self._shown:
            visible = visible.lstrip()
        self._at_marker, self._shown = False, True
        return visible

    def at_marker(self) -> None:
        """Note that a marker follows."""
        self._at_marker = True

    def finish(self) -> str:
        """Return the rest of the text, at the end of the answer."""
        rest, self._space = "".join(self._space), []
        return "" if self._at_marker else rest
