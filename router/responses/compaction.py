"""Compaction: a long conversation becomes a summary, which the client keeps encrypted.

The model writes the summary as the answer to one more turn of the same conversation, so that its
prompt is the cached prefix and a short question. A conversation that is longer than the context is
summarized in parts, each with the summary of those before it.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from msgspec import ValidationError, json
from msgspec.structs import replace

from router.errors import InvalidRequest
from router.generation.choice import OutputDelta
from router.responses.objects import (
    CompactionItem,
    OutputItem,
    OutputItemAddedEvent,
    OutputItemDoneEvent,
    SequencedEvent,
)
from router.responses.schemas import InputItem, ItemContentPart
from router.responses.sealing import ReasoningSeal
from router.schemas.conversation import ChatMessage, Tool
from router.schemas.requests import ChatRequest

MAX_SUMMARY_TOKENS = 2048
CONTEXT_SHARE = 8
"""A summary has at most this part of the context."""
_EXTRACT_CHARS = 4000
_HEADER = "Summary of the conversation so far:\n\n"
_TASK = """\
Stop working on the task. The conversation above will be deleted, and you will continue from your \
summary alone. Write it now, as plain text, without calling tools, under these headings:
Goal - what the user asked for, in their words where they matter.
Rules - what must and must not be done.
Done - what was changed and found out, with names of files, functions, commands and values.
Open - what is unfinished or failed, and how.
Next - the steps to take next."""
_KEPT_ROLES = ("user", "system", "developer")


class SummaryRequest(ChatRequest, frozen=True, kw_only=True):
    """Asks for a summary. The prompt shows the tools, as that of the conversation did, but the
    answer calls none."""

    shown_tools: Sequence[Tool] = ()

    @property
    def callable_tools(self) -> list[Tool]:
        return []

    @property
    def prompt_tools(self) -> list[Tool]:
        return list(self.shown_tools)


def summary_request(request: ChatRequest) -> SummaryRequest:
    """Return the request for a summary of the conversation of ``request``."""
    kept = ("model", "stream", "seed", "priority", "cache_salt", "temperature", "top_p", "top_k")
    args = {**request.template_args, "enable_thinking": False}
    args.pop("thinking_budget", None)
    return SummaryRequest(
        **{name: getattr(request, name) for name in kept},
        messages=[*request.messages, ChatMessage("user", _TASK)],
        chat_template_kwargs=args,
        shown_tools=request.prompt_tools,
    )


def with_summary(
    system: Sequence[ChatMessage], summary: str, rest: Sequence[ChatMessage]
) -> list[ChatMessage]:
    """Return a conversation with ``summary`` in place of what was between ``system`` and
    ``rest``."""
    return [*system, ChatMessage("user", _HEADER + summary), *rest]


def divided(
    messages: Sequence[ChatMessage], max_chars: int
) -> tuple[list[ChatMessage], list[ChatMessage]]:
    """Return the first of ``messages`` with at most ``max_chars``, and the rest. A call stays with
    its results if possible. A message that is longer alone is cut in its middle."""
    end = size = 0
    while end < len(messages) and (size := size + _size(messages[end])) <= max_chars:
        end += 1
    while end > 1 and end < len(messages) and messages[end].role in ("tool", "function"):
        end -= 1
    if end == 0:
        return [_cut(messages[0], max_chars)], list(messages[1:])
    return list(messages[:end]), list(messages[end:])


def extract(messages: Sequence[ChatMessage]) -> str:
    """Return the last texts of ``messages``, for a model that writes no summary."""
    found: list[str] = []
    left = _EXTRACT_CHARS
    for message in reversed(messages):
        text = _text(message)[:left]
        if text and message.role in ("user", "tool"):
            found.append(f"{message.role}: {text}")
            left -= len(text)
        if left <= 0:
            break
    return "\n\n".join(reversed(found)) or "(empty)"


def _text(message: ChatMessage) -> str:
    content = message.content
    if isinstance(content, list):
        return "\n".join(part.text or "" for part in content)
    return content or ""


def _size(message: ChatMessage) -> int:
    calls = sum(len(str(call.function.arguments)) for call in message.tool_calls or ())
    return len(_text(message)) + calls + len(message.reasoning_content or "") + 20


def _cut(message: ChatMessage, max_chars: int) -> ChatMessage:
    text, half = _text(message), max(1, max_chars // 2 - 20)
    short = text if len(text) <= max_chars else f"{text[:half]}\n[...]\n{text[-half:]}"
    # Arguments that are too long cannot be cut: they would be no JSON.
    return replace(message, content=short, tool_calls=None, reasoning_content=None)


def last_turn(messages: Sequence[ChatMessage]) -> int:
    """Return where the question, or the calls whose results end ``messages``, begin."""
    start = len(messages) - 1
    while start > 0 and messages[start].role in ("tool", "function"):
        start -= 1
    return max(0, start)


def num_system(messages: Sequence[ChatMessage]) -> int:
    """Return how many messages of the system ``messages`` begin with."""
    roles = [message.role in ("system", "developer") for message in messages]
    return (*roles, False).index(False)


# -- the item ------------------------------------------------------------------


class Capsule:
    """Seals summaries for one API key and model."""

    def __init__(self, seal: ReasoningSeal, owner: Sequence[str]) -> None:
        self._seal, self._owner = seal, list(owner)

    def close(self, summary: str) -> CompactionItem:
        sealed = self._seal.seal(json.encode([*self._owner, summary]).decode())
        return CompactionItem(id=f"cmp_{uuid.uuid4().hex}", encrypted_content=sealed)

    def expanded(self, items: Sequence[InputItem], num_earlier: int) -> list[InputItem]:
        """Return ``items`` with the text of each summary in its place. Of what was before it only
        the messages of the user and the system remain. Raises `InvalidRequest` for a summary that
        was not sealed here, or for another key or model."""
        found: list[InputItem] = []
        for index, item in enumerate(items, -num_earlier):
            if item.type not in ("compaction", "context_compaction"):
                found.append(item)
                continue
            path = "previous_response_id" if index < 0 else f"input[{index}].encrypted_content"
            text = _HEADER + self._open(item.encrypted_content or "", path)
            found = [each for each in found if each.role in _KEPT_ROLES]
            part = ItemContentPart(type="input_text", text=text)
            found.append(InputItem(type="message", id=item.id, role="user", content=[part]))
        return found

    def _open(self, sealed: str, path: str) -> str:
        opened = self._seal.unseal(sealed)
        try:
            *owner, summary = json.decode(opened or "[]", type=list[str])
        except (ValidationError, ValueError):
            owner, summary = [], ""
        if owner != self._owner:
            raise InvalidRequest(
                f"'{path}' is not a summary that this server has made for this API key and model. "
                "Begin a new conversation.",
                param=path,
                code="invalid_encrypted_content",
            )
        return summary


class CompactionBuilder:
    """Builds the one output item of a compaction. In the way of `OutputItemBuilder`."""

    def __init__(self, capsule: Capsule, fallback: str) -> None:
        self._capsule = capsule
        self._fallback = fallback
        self._text = ""
        self.finished: list[OutputItem] = []
        self._begun: CompactionItem | None = None

    def feed(self, delta: OutputDelta, logprobs: object = ()) -> list[SequencedEvent]:
        self._text += delta.text
        return []

    def begin(self) -> list[SequencedEvent]:
        """Return the events that come before the summary is known."""
        self._begun = self._capsule.close("")
        item = replace(self._begun, encrypted_content="")
        return [OutputItemAddedEvent(output_index=0, item=item)]

    def finish(self, last_status: object = "completed") -> list[SequencedEvent]:
        item = self._capsule.close(self._text.strip() or self._fallback)
        if self._begun is not None:
            item = replace(item, id=self._begun.id)
        self.finished.append(item)
        return [OutputItemDoneEvent(output_index=0, item=item)]
