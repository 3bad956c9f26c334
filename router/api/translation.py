"""What translations of other APIs' requests into a `ChatRequest` share.

A path names a field as errors do: ``messages[0].content``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from router.errors import InvalidRequest
from router.schemas.conversation import ChatMessage, ToolCall

_Value = TypeVar("_Value")

PARAGRAPH_BREAK = "\n\n"


def with_paths(values: Iterable[_Value], path: str) -> Iterator[tuple[str, _Value]]:
    """Yield each of ``values``, a list at ``path``, behind its own path."""
    for index, value in enumerate(values):
        yield f"{path}[{index}]", value


def required(value: _Value | None, path: str, name: str) -> _Value:
    """Return ``value``, the field ``name`` of ``path``. Raises `InvalidRequest` if it is None."""
    if value is None:
        raise InvalidRequest(f"'{path}.{name}' is missing.", param=f"{path}.{name}")
    return value


def unsupported_content(content_type: str, path: str) -> InvalidRequest:
    return InvalidRequest(
        f"'{path}': content of type '{content_type}' is not supported here; this server takes"
        " text.",
        param=f"{path}.type",
        code="unsupported_content",
    )


def content_note(content_type: str) -> str:
    """Return the text that stands in place of content that is left out."""
    return f"[Content of type '{content_type}' was left out: this server takes text.]"


def assistant_message(
    texts: Iterable[str], thoughts: Iterable[str], calls: list[ToolCall]
) -> ChatMessage:
    """Return one message of all that the assistant wrote in a turn."""
    return ChatMessage(
        "assistant",
        "".join(texts),
        tool_calls=calls or None,
        reasoning_content=PARAGRAPH_BREAK.join(filter(None, thoughts)) or None,
    )
