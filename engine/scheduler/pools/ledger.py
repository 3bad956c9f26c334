"""The ledger: how many bytes are reserved, and how many may be."""

from __future__ import annotations

OOM_LIMIT_SHARE = 0.9
"""When the device runs out of memory, the new limit as a fraction of the old one. All sequences
start again, and the longest must still fit: a limit near the memory then in use would end it."""
RAISED_SHARE = 0.1
"""By which part of the original limit a lowered one is raised again."""
STEPS_TO_RAISE = 1000
"""Steps without running out of memory before that. They double each time that memory runs out: if
the device has less for good, all sequences start again less and less often."""


class Ledger:
    """Reserved bytes. They never exceed the limit: reserve before use."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = self._full_bytes = limit_bytes
        self.used_bytes = 0
        self._steps, self._steps_to_raise = 0, STEPS_TO_RAISE

    def shortfall(self, size_bytes: int) -> int:
        """Return how many bytes are missing for ``size_bytes`` more; none if not positive."""
        return self.used_bytes + size_bytes - self.limit_bytes

    def reserve(self, size_bytes: int) -> None:
        """Reserve ``size_bytes``. Raises: RuntimeError if they are over the limit."""
        if self.shortfall(size_bytes) > 0:
            raise RuntimeError(f"reserving {size_bytes} bytes exceeds the limit")
        self.used_bytes += size_bytes

    def release(self, size_bytes: int) -> None:
        self.used_bytes -= size_bytes

    def ran_out(self, least_bytes: int, beside_bytes: int = 0) -> None:
        """Lower the limit, because the device ran out of memory, but not below ``least_bytes``.
        Of both, ``beside_bytes`` are for data with a limit of its own, and stay."""
        lowered = beside_bytes + int(OOM_LIMIT_SHARE * (self.limit_bytes - beside_bytes))
        self.limit_bytes = max(least_bytes, lowered)
        self._steps = 0
        self._steps_to_raise *= 2

    def step_succeeded(self) -> None:
        """Count a step. After many, raise a lowered limit: another program may have used the
        memory."""
        if self.limit_bytes < self._full_bytes:
            self._steps += 1
            if self._steps >= self._steps_to_raise:
                raised = self.limit_bytes + int(RAISED_SHARE * self._full_bytes)
                self.limit_bytes, self._steps = min(raised, self._full_bytes), 0
