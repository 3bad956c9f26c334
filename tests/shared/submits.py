"""Requests as a router sends them to engines."""

from __future__ import annotations

from typing import Any

from shared import wire


def submit(name: str = "a", token_ids: list[int] | None = None, **fields: Any) -> wire.Submit:
    """Return a greedy request for a few tokens, with further ``fields``."""
    plain: dict[str, Any] = {
        "request_id": name,
        "attempt": 0,
        "token_ids": [1] if token_ids is None else token_ids,
        "sampling": wire.SamplingParams(seed=1),
        "max_tokens": 9,
        "stop_token_ids": [],
    }
    return wire.Submit(**plain | fields)
