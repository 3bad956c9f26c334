"""How many sequences may run at once after steps that raised."""

from __future__ import annotations

STEPS_TO_DOUBLE = 100
"""After so many steps that went well, twice as many sequences may run as before."""


class ConcurrencyBackoff:
    """``limit`` is the most that may hold a slot: ``max_sequences``, half of those that did when a
    step raised, and then more again. So who makes steps raise is found to be alone some time."""

    def __init__(self, max_sequences: int) -> None:
        self.limit = self._max_sequences = max_sequences
        self._successes = 0

    def step_failed(self, num_running: int) -> None:
        """A step raised while ``num_running`` sequences held slots."""
        self.limit = max(1, num_running // 2)
        self._successes = 0

    def step_succeeded(self) -> None:
        """A step went well."""
        self._successes += 1
        if self._successes >= STEPS_TO_DOUBLE and self.limit < self._max_sequences:
            self.limit = min(2 * self.limit, self._max_sequences)
            self._successes = 0
