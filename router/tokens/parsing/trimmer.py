"""Text between markers, without the white space that only sets markers apart."""

from __future__ import annotations


class WhitespaceTrimmer:
    """What templates add or take away again around markers is not part of a text: white
    space before its beginning and behind its end, where a marker is beside it. ``at_marker`` says
    whether one is at the beginning."""

    def __init__(self, *, at_marker: bool = False) -> None:
        self._at_marker = at_marker
        self._shown = False
        self._space = ""

    @property
    def blank(self) -> bool:
        """Whether there has been nothing but white space since the last marker."""
        return self._at_marker or not self._shown

    def feed(self, text: str) -> str:
        """What is certainly of the text now."""
        text = self._space + text
        visible = text.rstrip()
        self._space = text[len(visible) :]
        if not visible:
            return ""
        if self._at_marker and not self._shown:
            visible = visible.lstrip()
        self._at_marker, self._shown = False, True
        return visible

    def at_marker(self) -> None:
        """A marker comes next."""
        self._at_marker = True

    def finish(self) -> str:
        """Nothing comes any more."""
        rest, self._space = self._space, ""
        return "" if self._at_marker else rest
