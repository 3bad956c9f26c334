"""How far a rank is in the sequence of plans, and a digest of what it computed."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple
from zlib import crc32

KEPT_DIGESTS = 4096
"""Number of last plans kept. A rank is never this far behind: it would have been
declared failed."""


class Steps(NamedTuple):
    """Numbers of plans, counted from 1."""

    begun: int = 0
    done: int = 0
    digest: int = 0
    """Over all plans up to ``done``, and their tokens."""


class StepProgress:
    """Counts the plans of this rank. Written by the main thread; other threads may read."""

    def __init__(self) -> None:
        self.steps = Steps()
        self._plans: deque[int] = deque()
        self._digests: dict[int, int] = {0: 0}

    def begin(self, packed_plan: bytes) -> None:
        """Record that a plan is about to be dispatched."""
        self._plans.append(crc32(packed_plan))
        self.steps = self.steps._replace(begun=self.steps.begun + 1)

    def finish(self, tokens: Sequence[int]) -> None:
        """Record that the oldest plan in flight produced ``tokens``."""
        content = array("q", [self._plans.popleft(), *tokens]).tobytes()
        digest, done = crc32(content, self.steps.digest), self.steps.done + 1
        self._digests[done] = digest
        self._digests.pop(done - KEPT_DIGESTS, None)
        self.steps = self.steps._replace(done=done, digest=digest)

    def differs(self, other: Steps) -> bool:
        """Return whether a rank that is as far as ``other`` computed anything different."""
        own = self._digests.get(other.done)
        return own is not None and own != other.digest
