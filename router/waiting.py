"""Waiting for an event, but not for longer than a time."""

from __future__ import annotations

import asyncio
import contextlib


async def wait_at_most(event: asyncio.Event, seconds: float | None) -> None:
    """Return once ``event`` is set, or after ``seconds``; None: there is no such limit."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)
