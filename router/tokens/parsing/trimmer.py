"""Text between markers, without the whitespace that separates it from them."""

from __future__ import annotations

from collections.abc import Sequence

Span = tuple[int, int]
"""Start and end, in characters."""


class WhitespaceTrimmer:
    """Drops whitespace at the end of a text, and blank lines at its start, next to a marker,
    because templates add or remove them there. ``at_marker``: whether a marker precedes the text.
    ``indented``: whether the first line keeps its indentation."""

    spans: Sequence[Span] = ()
    """Where the text that was returned last is in the answer."""

    def __init__(self, *, at_marker: bool = False, indented: bool = True) -> None:
        self._at_marker = at_marker
        self._indented = indented
        self._shown = False
        self._space: list[str] = []  # held back: whitespace at the end of the text
        self._space_spans: list[Span] = []

    @property
    def blank(self) -> bool:
        """Whether there was only whitespace since the last marker."""
        return self._at_marker or not self._shown

    def feed(self, text: str, end: int = 0) -> str:
        """Return the text that is final now. ``text`` ends at character ``end`` of the answer."""
        start = end - len(text)
        if not text or text.isspace():
            self._space.append(text)
            self._space_spans.append((start, end))
            return ""
        visible = text.rstrip()
        space, self._space = self._space, [text[len(visible) :]]
        middle = start + len(visible)
        spans, self._space_spans = self._space_spans, [(middle, end)] if middle < end else []
        if self._at_marker and not self._shown:
            before = "".join(space)
            own = visible.lstrip()
            lead = before + visible[: len(visible) - len(own)]
            if not self._indented:
                lead = ""
            lead = lead[lead.rfind("\n") + 1 :]
            visible = lead + own
            self.spans = [(middle - len(visible), middle)]
        else:
            visible = "".join([*space, visible])
            self.spans = [*spans, (start, middle)]
        self._at_marker, self._shown = False, True
        return visible

    def at_marker(self) -> None:
        """Note that a marker follows."""
        self._at_marker = True
        if not self._shown:
            self._space.clear()
            self._space_spans.clear()

    def finish(self) -> str:
        """Return the rest of the text, at the end of the answer."""
        rest, self._space = "".join(self._space), []
        self.spans, self._space_spans = self._space_spans, []
        return "" if self._at_marker else rest
