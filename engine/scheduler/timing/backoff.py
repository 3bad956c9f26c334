"""The number of sequences that run at once, after steps that raised."""

from __future__ import annotations

STEPS_TO_DOUBLE = 100
"""Successful steps after which the limit doubles."""

PLANS_BETWEEN_TRIES = 8
"""See `AdmissionRetry`."""


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


class AdmissionRetry:
    """When the first sequence of the queue, which found no room for its slot, asks again: once a
    slot was freed, or after a few plans. Each time its whole prefix is looked up, which takes
    milliseconds with 100,000 tokens, and those who run would wait for it."""

    def __init__(self) -> None:
        self._refused = ""
        self._used_rows = 0
        self._skips_left = 0

    def refused(self, name: str, used_rows: int) -> None:
        """Record that the request ``name`` found no room beside ``used_rows`` slots."""
        self._refused, self._used_rows, self._skips_left = name, used_rows, PLANS_BETWEEN_TRIES - 1

    def skips(self, name: str, used_rows: int) -> bool:
        """Return whether it does not ask in this plan."""
        if name != self._refused or not self._skips_left:
            return False
        self._skips_left -= 1
        return 0 < self._used_rows <= used_rows
