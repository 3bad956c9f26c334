"""The shared part of the translation of other APIs' requests to a `ChatRequest`.

A path names a field as in error messages: ``messages[0].content``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import TypeVar

from msgspec.structs import replace

from router.errors import InvalidRequest
from router.schemas.conversation import (
    PARAGRAPH_BREAK,
    ChatMessage,
    ContentPart,
    ImageUrl,
    ToolCall,
)
from router.schemas.images import SentImage

_Value = TypeVar("_Value")

_BILLING = re.compile(
    r"^x-anthropic-billing-header:(?:(?:[ \t]*\w+=[^;\s]*(?:;|(?=\s|\Z)))+|[^\n]*)[ \t]*\n*",
    re.MULTILINE,
)
"""A line of Claude Code in system prompts that is not for the model. It changes with each turn, so
that no cached prefix would be found."""


def with_paths(values: Iterable[_Value], path: str) -> Iterator[tuple[str, _Value]]:
    """Yield each of ``values``, a list at ``path``, with its own path."""
    for index, value in enumerate(values):
        yield f"{path}[{index}]", value


def required(value: _Value | None, path: str, name: str) -> _Value:
    """Return ``value``, the field ``name`` at ``path``. Raises `InvalidRequest` if it is None."""
    if value is None:
        raise InvalidRequest(f"'{path}.{name}' is required.", param=f"{path}.{name}")
    return value


def content_note(content_type: str) -> str:
    """Return the text that replaces unsupported content."""
    return f"[Content of type '{content_type}' was removed: this server accepts text only.]"


def joined_content(parts: Iterable[str | SentImage], separator: str) -> str | list[ContentPart]:
    """Return a message's content: text, joined with ``separator``, or a list if there
    are images."""
    found: list[str | SentImage] = []
    for kind, group in groupby(parts, type):
        together = list(group)
        found += [separator.join(map(str, together))] if kind is str else together
    if not any(isinstance(part, SentImage) for part in found):
        return "".join(part for part in found if isinstance(part, str))
    return [ContentPart("text", part) if isinstance(part, str) else part for part in found]


def with_sent_images(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Return ``messages`` from a client of OpenAI's chat API with each image as a `SentImage`.
    Raises `InvalidRequest`."""
    return [
        replace(message, content=_with_sent_images(message.content, f"{path}.content"))
        if isinstance(message.content, list)
        else message
        for path, message in with_paths(messages, "messages")
    ]


def _with_sent_images(content: Sequence[ContentPart], path: str) -> list[ContentPart]:
    return [
        sent_image(part.image_url, part_path, part.type) if part.type == "image_url" else part
        for part_path, part in with_paths(content, path)
    ]


def sent_image(image_url: ImageUrl | str | None, path: str, content_type: str) -> SentImage:
    """Return the image in a part at ``path`` in OpenAI's format. Raises `InvalidRequest`."""
    url = image_url.url if isinstance(image_url, ImageUrl) else image_url
    source = required(url, path, "image_url")
    return SentImage(type=content_type, source=source, is_url=True, path=path)


def without_billing(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Return ``messages`` without Claude Code's billing line in those of the system."""
    found = [_without_billing(message) for message in messages]
    return [each for each in found if each is not None] or list(messages)


def _without_billing(message: ChatMessage) -> ChatMessage | None:
    """Return None if there is nothing else in ``message``."""
    content = message.content
    if message.role not in ("system", "developer") or not content:
        return message
    if isinstance(content, str):
        text = _BILLING.sub("", content)
        return replace(message, content=text) if text else None
    texts = [_BILLING.sub("", part.text) if part.text else part.text for part in content]
    parts = [
        replace(part, text=text)
        for part, text in zip(content, texts, strict=True)
        if text or not part.text
    ]
    return replace(message, content=parts) if parts else None


def assistant_message(
    texts: Iterable[str], thoughts: Iterable[str], calls: list[ToolCall]
) -> ChatMessage:
    """Return one message with everything that the assistant wrote in a turn."""
    return ChatMessage(
        "assistant",
        "".join(texts),
        tool_calls=calls or None,
        reasoning_content=PARAGRAPH_BREAK.join(filter(None, thoughts)) or None,
    )
