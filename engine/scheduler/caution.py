"""How many sequences may run at once after steps that raised."""

from __future__ import annotations

CALM_STEPS = 100
"""After so many steps that went well, twice as many sequences may run as before."""


class Caution:
    """``limit`` is the most that may hold a slot: ``most``, half of those that did when a step
    raised, and then more again. So who makes steps raise is found to be alone some time."""

    def __init__(self, most: int) -> None:
        self.limit = self._most = most
        self._calm = 0

    def alarm(self, holders: int) -> None:
        """A step raised while ``holders`` sequences held slots."""
        self.limit = max(1, holders // 2)
        self._calm = 0

    def calm(self) -> None:
        """A step went well."""
        self._calm += 1
        if self._calm >= CALM_STEPS and self.limit < self._most:
            self.limit = min(2 * self.limit, self._most)
            self._calm = 0
