"""Calls in conversations where templates do not show them as their models write them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_Json = dict[str, Any]

_FUNCTIONS = "functions."
_MOST_WAITING = 128
"""Max number of calls of a message whose results may come without an id."""

# -- ids of calls ----------------------------------------------------------------


def with_named_ids(messages: Sequence[_Json]) -> list[_Json]:
    """Return ``messages`` with ids as Kimi K2 writes them, ``functions.NAME:NUMBER``: the template
    shows a call's id in place of its name. Clients keep ids of other models, and those of Ollama
    none. A result has the id of its call; without an id it belongs to the first call of the tool
    that has no result."""
    found: list[_Json] = []
    ids: dict[str, str] = {}  # by those that they replace
    waiting: list[str] = []  # calls without result, of the last message that has any
    count = 0
    for message in messages:
        if calls := message.get("tool_calls"):
            named = [_named(call, count + number) for number, call in enumerate(calls)]
            count += len(calls)
            before = (call.get("id") for call in calls)
            ids |= {old: call["id"] for old, call in zip(before, named, strict=True) if old}
            waiting = [call["id"] for call in named[:_MOST_WAITING]]
            message = {**message, "tool_calls": named}
        elif message["role"] == "tool":
            given, name = message.get("tool_call_id"), message.get("name")
            own = ids.get(given) if given else _first_of(name, waiting)
            if own is not None:
                message = {**message, "tool_call_id": own}
                if own in waiting:
                    waiting.remove(own)
        found.append(message)
    return found


def _named(call: _Json, number: int) -> _Json:
    name: str = call["function"]["name"]
    before, _, digits = (call.get("id") or "").rpartition(":")
    if before.endswith(name) and digits.isascii() and digits.isdigit():
        prefix = _FUNCTIONS if before.endswith(_FUNCTIONS + name) else ""
        return {**call, "id": f"{prefix}{name}:{digits}"}
    return {**call, "id": f"{_FUNCTIONS}{name}:{number}"}


def _first_of(name: str | None, waiting: Sequence[str]) -> str | None:
    starts = (f"{name}:", f"{_FUNCTIONS}{name}:")
    return next((each for each in waiting if name is None or each.startswith(starts)), None)
