"""Decides in which steps drafts are looked for."""

from __future__ import annotations

SEARCHES, LONGEST_REST = 16, 3
"""After this many searches in vain, one step is left out between two searches; after twice as many,
two, and so on up to the second number. A step leaves nothing in the caches of a CPU that a search
needs, which then takes up to 0.7 % of a step: as much as drafts that fail."""


class SearchPace:
    """Searches become rarer as long as nothing worth verifying is found.

    Drafts that begin in between are found up to three tokens later."""

    def __init__(self, *, rests: bool) -> None:
        """Without ``rests`` there is a search in each step: a model makes the drafts anyway."""
        self._rests = rests
        self._in_vain = 0  # searches since something was found, or a sequence began
        self._left = 0  # steps until the next search

    def begin(self) -> None:
        """Search in each step again: a sequence begins, and may be one that repeats itself."""
        self._in_vain = self._left = 0

    def skips_step(self) -> bool:
        """Return whether there is no search in this step. Called once a step."""
        self._left -= 1
        return self._left >= 0

    def searched(self, *, found: bool) -> None:
        """Record whether a search found drafts that are worth verifying."""
        self._in_vain = 0 if found else self._in_vain + 1
        self._left = min(self._in_vain // SEARCHES, LONGEST_REST) if self._rests else 0
