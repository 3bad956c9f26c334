"""The engines that a request has lost, of which it may be the cause."""

from __future__ import annotations

MAX_GONE = 2
"""A request fails once this many engines are gone that had it, because it may be the cause."""
MAX_LOSSES = 6
"""Nor is it tried more often than this, because it may be what keeps engines silent."""
FORGIVEN_AFTER_TOKENS = 256
"""A request that generates this many tokens after a loss was not its cause. A harmful request can
thus end at most one engine per this many of its tokens."""


class Losses:
    """Counts unplanned losses. An engine that was silent and comes back is not gone."""

    def __init__(self) -> None:
        self._count = 0
        self._gone: set[str] = set()
        """The incarnations of engines."""
        self._tokens = 0
        """Number of the request's tokens at the last loss or planned exit."""

    def __bool__(self) -> bool:
        return self._count > 0

    @property
    def are_too_many(self) -> bool:
        return len(self._gone) >= MAX_GONE or self._count >= MAX_LOSSES

    def add(self, gone: str | None, num_tokens: int, *, planned: bool) -> None:
        """Note that an engine has lost the request after ``num_tokens`` tokens of the answer.
        ``gone`` is its incarnation, None if the engine is still there."""
        if num_tokens - self._tokens >= FORGIVEN_AFTER_TOKENS:
            self._count = 0
            self._gone.clear()
        self._tokens = num_tokens
        if not planned:
            self._count += 1
            if gone is not None:
                self._gone.add(gone)

    def on_return(self, incarnation: str) -> None:
        self._gone.discard(incarnation)
