"""The number of sequences that run at once, after steps that raised."""

from __future__ import annotations

STEPS_TO_DOUBLE = 100
"""Successful steps after which the limit doubles."""


class ConcurrencyBackoff:
    """Halves the number of running sequences with each step that raises, and doubles it while steps
    succeed. A sequence that makes steps raise eventually runs alone."""

    def __init__(self, max_sequences: int) -> None:
        self.limit = max_sequences
        """Max sequences that may hold a slot now."""
        self._max_sequences = max_sequences
        self._successes = 0

    def step_failed(self, num_running: int) -> None:
        """Lower the limit, because a step raised while ``num_running`` sequences held slots."""
        self.limit = max(1, num_running // 2)
        self._successes = 0

    def step_succeeded(self) -> None:
        """Count a step that did not raise."""
        self._successes += 1
        if self._successes >= STEPS_TO_DOUBLE and self.limit < self._max_sequences:
            self.limit = min(2 * self.limit, self._max_sequences)
            self._successes = 0
