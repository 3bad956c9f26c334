"""Text between markers, without the white space that only sets markers apart."""

from __future__ import annotations


class Prose:
    """What templates add or take away again around markers is not part of a text: white
    space before its beginning and behind its end, where a marker is beside it. ``beside`` says
    whether one is at the beginning."""

    def __init__(self, *, beside: bool = False) -> None:
        self._beside = beside
        self._shown = False
        self._space = ""

    @property
    def fresh(self) -> bool:
        """Whether there has been nothing but white space since the last marker."""
        return self._beside or not self._shown

    def add(self, text: str) -> str:
        """What is certainly of the text now."""
        text = self._space + text
        visible = text.rstrip()
        self._space = text[len(visible) :]
        if not visible:
            return ""
        if self._beside and not self._shown:
            visible = visible.lstrip()
        self._beside, self._shown = False, True
        return visible

    def marker(self) -> None:
        """A marker comes next."""
        self._beside = True

    def rest(self) -> str:
        """Nothing comes any more."""
        rest, self._space = self._space, ""
        return "" if self._beside else rest
