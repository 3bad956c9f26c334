"""Items of a conversation that this server cannot run, and tools that a conversation adds."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from router.schemas.conversation import Tool
from router.tokens.conversations.tools import tool_schema

MAX_NOTE_CHARS = 4000
_SHOWN_TYPE = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def item_note(item_type: str, fields: Mapping[str, Any]) -> str:
    """Return a text in place of an item of type ``item_type``, with those of ``fields`` that
    are set. A conversation from another server must not end because of such an item."""
    told = [f"{name}={_text(value)}" for name, value in fields.items() if value]
    note = " ".join([item_type, *told])
    return f"[{note[:MAX_NOTE_CHARS]}]"


def shown_types(types: Iterable[str]) -> list[str]:
    """Return those of ``types`` that can be put into a header."""
    return [each for each in dict.fromkeys(types) if _SHOWN_TYPE.fullmatch(each)]


def definitions(tools: Iterable[Tool]) -> str:
    """Return the text that makes ``tools`` known in the middle of a conversation. The tools at its
    beginning do not change, so that its prefix stays cached."""
    lines = [_text(tool_schema(tool)) for tool in tools]
    return "\n".join(["These tools are now available:", *lines])


def _text(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
