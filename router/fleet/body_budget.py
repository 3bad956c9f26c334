"""Memory for bodies of requests while they are read and parsed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from router.errors import Unavailable
from router.fair_shares import FairShares

_RETRY_AFTER_S = 2.0


class BodyBudget:
    """Counts the bytes of bodies that have arrived in part or are not parsed yet."""

    def __init__(self, limit_bytes: Callable[[], int]) -> None:
        """``limit_bytes`` follows the limit of one body, which models that load raise."""
        self._limit_bytes = limit_bytes
        self._used = FairShares()

    @property
    def used_bytes(self) -> int:
        return self._used.total

    @contextmanager
    def reading(self, share: str) -> Iterator[BodyBytes]:
        """Count the bytes of one body of ``share`` until the end of the block."""
        body = BodyBytes(self, share)
        try:
            yield body
        finally:
            body.release()

    def take(self, share: str, count: int) -> None:
        if not self._used.has_room(share, self._limit_bytes(), count):
            raise Unavailable(
                "The server is receiving too many large requests at once.",
                code="too_many_bodies",
                retry_after_s=_RETRY_AFTER_S,
            )
        self._used.take(share, count)

    def give_back(self, share: str, count: int) -> None:
        self._used.give_back(share, count)


class BodyBytes:
    """The bytes of one body."""

    def __init__(self, budget: BodyBudget, share: str) -> None:
        self._budget, self._share = budget, share
        self._count = 0

    def add(self, count: int) -> None:
        """Raises `Unavailable`."""
        self._budget.take(self._share, count)
        self._count += count

    def release(self) -> None:
        self._budget.give_back(self._share, self._count)
        self._count = 0
