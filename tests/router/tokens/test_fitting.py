"""Conversations of agents in the templates of models: nothing is refused, and nothing is lost."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest
from mlx_lm import tokenizer_utils

from router.schemas.conversation import ChatMessage
from router.tokens.conversations.fitting import TemplateLimits, fitted
from router.tokens.templates import ChatTemplate
from tests.router.tokens.template_table import (
    AGAIN,
    CALL,
    DEVELOPER,
    NAMES,
    REPLY,
    RESULT,
    SECOND_CALL,
    SECOND_RESULT,
    SYSTEM,
    TOOL,
    USER,
    called,
    template_of,
)

ERROR = ChatMessage("tool", "Error: RESULT-1", tool_call_id="aaaaaaaa1")
LATE = ChatMessage("developer", "SYSTEM-3")
TEXT = called(CALL, text="TEXT")
BOTH = called(CALL, SECOND_CALL)
CONVERSATIONS = [
    [SYSTEM, DEVELOPER, USER],
    [SYSTEM, USER, REPLY, LATE, AGAIN],
    [SYSTEM, USER, REPLY, AGAIN, LATE],
    [USER, AGAIN],
    [SYSTEM, USER, called(CALL), ERROR],
    [USER, TEXT, RESULT, AGAIN, REPLY, AGAIN],
    [USER, BOTH, RESULT, SECOND_RESULT],
    [SYSTEM, USER, BOTH, SECOND_RESULT, RESULT, AGAIN],
    [DEVELOPER, USER, called(CALL), RESULT, LATE, called(SECOND_CALL), SECOND_RESULT, AGAIN],
]


@pytest.mark.parametrize("name", NAMES)
def test_a_template_shows_its_tools_and_all_said_called_and_answered(
    name: str, chat_model_dir: Path
) -> None:
    template = template_of(name, chat_model_dir)
    for messages in CONVERSATIONS:
        shown = template.render(messages, [TOOL], {})
        said = re.findall(r"[A-Z]+-[123]|TEXT|REPLY", repr(messages))
        wanted = {each for each in said if each != "RESULT-"}
        wanted |= {"RESULT-2"} if SECOND_RESULT in messages else set()
        wanted |= {"Lists.", "path"} if messages is CONVERSATIONS[0] else set()
        if name.startswith("mistral") or (name == "gpt-oss" and REPLY in messages):
            wanted -= {"TEXT"}  # left out beside a call, or as reasoning of an earlier turn
        missing = {each for each in wanted if each not in shown}
        assert not missing, (name, messages, shown)


@pytest.mark.parametrize("name", NAMES)
def test_a_longer_conversation_begins_with_the_shorter_one(name: str, chat_model_dir: Path) -> None:
    if name.startswith("mistral"):
        pytest.skip("these templates put the system's text and the tools before the last question")
    template = template_of(name, chat_model_dir)
    messages = [SYSTEM, DEVELOPER, USER, BOTH, RESULT, SECOND_RESULT, REPLY, LATE, AGAIN]
    for length in (3, 6):
        shorter = template.render(messages[:length], [TOOL], {}, ending="last_message")
        longer = template.render(messages, [TOOL], {}, ending="last_message")
        assert longer.startswith(shorter.rstrip()[:-30]), name


def plain(role: str, content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


def said(*texts: str) -> list[dict[str, Any]]:
    """Return messages that are written like `user: hello`."""
    return [plain(*text.split(": ")) for text in texts]


FIRST_SYSTEM = TemplateLimits(system=True)
ANY_SYSTEM = TemplateLimits(system=True, later_system=True, users_in_a_row=True)
PARTS = TemplateLimits(plain_content=True)
SYSTEMS = ("system: a", "system: b")


@pytest.mark.parametrize(
    ("limits", "messages", "expected"),
    [
        (ANY_SYSTEM, said(*SYSTEMS, "user: c", "system: d"), said("user: a\n\nb\n\nc\n\nd")),
        (FIRST_SYSTEM, said("system: a", "assistant: b"), said("user: a", "assistant: b")),
        (PARTS, said("user: a"), [plain("user", [{"type": "text", "text": "a"}])]),
        (TemplateLimits(), said(*SYSTEMS), said(*SYSTEMS)),
    ],
)
def test_messages_change_only_where_a_template_cannot_take_them(
    limits: TemplateLimits, messages: list[dict[str, Any]], expected: list[dict[str, Any]]
) -> None:
    assert fitted(messages, limits) == expected


def test_results_follow_their_calls_however_many_there_are() -> None:
    count = 20_000
    calls = [{"id": str(n), "function": {"name": "f", "arguments": {}}} for n in range(count)]
    results = [plain("tool", "R", tool_call_id=str(n)) for n in reversed(range(count))]
    stray = [plain("tool", "R", tool_call_id="other")] * count
    whole = [plain("user", "a"), plain("assistant", "", tool_calls=calls), *stray, *results]
    began = time.monotonic()
    found = fitted(whole, TemplateLimits(several_calls=True))
    assert time.monotonic() - began < 10
    ids = [each["tool_call_id"] for each in found if each["role"] == "tool"]
    assert ids == [*map(str, range(count)), *["other"] * count]
    assert found[3]["tool_calls"] == [calls[1]] and len(found) == 1 + 3 * count


def test_many_messages_in_a_row_are_joined_at_once() -> None:
    messages = [plain("user", "\U0001f600"), *([plain("user", "x" * 60)] * 17_000)]
    began = time.monotonic()
    (found,) = fitted(messages, TemplateLimits(users_in_a_row=True))
    assert time.monotonic() - began < 3
    assert found["content"] == "\n\n".join(each["content"] for each in messages)


def test_results_without_ids_follow_calls_without_ids_in_order() -> None:
    calls = [{"function": {"name": name, "arguments": {}}} for name in "fgh"]
    results = [plain("tool", content) for content in ("1", "2")]
    whole = [plain("user", "a"), plain("assistant", "", tool_calls=calls), *results]
    found = fitted(whole, TemplateLimits(several_calls=True))
    assert [each["content"] for each in found] == ["a", "", "1", "", "2", ""]


def test_content_is_a_list_for_templates_that_take_nothing_else(chat_model_dir: Path) -> None:
    tokenizer = tokenizer_utils.load(chat_model_dir)
    tokenizer.chat_template = (
        "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"
    )
    template = ChatTemplate(tokenizer, {}, has_reasoning=False)
    assert template.render([USER, AGAIN], [], {}) == "USER-1USER-2"
