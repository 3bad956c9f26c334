"""Adapts conversations to templates that would reject them or lose a part of them.

Templates support different things: one system message or none, alternating roles, one tool call at
a time. Clients send anything. What a template does not support is found once, by rendering short
test conversations. It is then avoided in every conversation, even where it would not matter, so
that a longer prompt continues the shorter one and its prefix is found in the cache.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from router.schemas.conversation import PARAGRAPH_BREAK
from router.tokens.json_texts import decoded_json

_Json = dict[str, Any]
Renders = Callable[[list[_Json], bool], str]
"""Renders a conversation, with a tool or without. May raise any exception."""


@dataclass(frozen=True)
class TemplateLimits:
    """The forms that a template does not support: it raises, omits something, or moves it."""

    system: bool = False
    """A system message. It becomes the beginning of the first user message."""
    several_systems: bool = False
    """Two system messages at the beginning. They are merged."""
    later_system: bool = False
    """A system message after others. It becomes a user message."""
    users_in_a_row: bool = False
    """Two user messages in a row. They are merged."""
    tool_messages: bool = False
    """Tool calls and results. They become text of the assistant and the user."""
    several_calls: bool = False
    """Two tool calls in one message. Each gets its own message, followed by its result."""
    user_after_tool: bool = False
    """User text after a tool result. It is appended to the result."""
    text_with_call: bool = False
    """Text next to a tool call. It becomes a message before it."""
    plain_content: bool = False
    """Take content that is text. It becomes a list with one part."""
    calls: bool = False
    """Show calls. They become text of the assistant's, as the model writes them."""


def _user(text: str) -> _Json:
    return {"role": "user", "content": text}


def _said(text: str, *calls: str) -> _Json:
    message: _Json = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = [
            {"type": "function", "id": call, "function": {"name": "probe", "arguments": {}}}
            for call in calls
        ]
    return message


def _result(text: str, call: str) -> _Json:
    return {"role": "tool", "content": text, "name": "probe", "tool_call_id": call}


_SYSTEM = {"role": "system", "content": "PROBE-1"}
_CALLS = ("probe0001", "probe0002")


def limits_of(renders: Renders, arguments: Callable[[str], Any]) -> TemplateLimits:
    """Return what the template of ``renders`` does not support. ``arguments`` converts the
    arguments of a call, given as JSON, to the form that the template expects."""
    parts = False

    def fails(*messages: _Json, show_calls: bool = False) -> bool:
        wanted = [text for message in messages for text in _texts(message, show_calls)]
        conversation = [_with_arguments(message, arguments) for message in messages]
        if parts:
            conversation = [_in_parts(message) for message in conversation]
        try:
            text = renders(conversation, any("tool_calls" in message for message in messages))
        except Exception:  # a template is untrusted code
            return True
        places = [text.find(each) for each in wanted]
        return -1 in places or places != sorted(places)

    hello, reply = _user("PROBE-U"), _said("PROBE-A")
    if fails(hello):
        parts = True
        if fails(hello):
            return TemplateLimits()  # nothing can be tested
    one, two = _CALLS
    called = (hello, _said("", one), _result("PROBE-R", one))
    tool = fails(*called)
    hides_calls = not tool and fails(*called, show_calls=True)
    following = _user("PROBE-V")
    system = (
        fails(_SYSTEM, hello)
        or fails(_SYSTEM, hello, reply, following)
        or (not tool and fails(_SYSTEM, *called))
    )
    second = {**_SYSTEM, "content": "PROBE-2"}
    return TemplateLimits(
        system=system,
        several_systems=not system and fails(_SYSTEM, second, hello),
        later_system=system or fails(_SYSTEM, hello, reply, second, following),
        users_in_a_row=fails(hello, following),
        tool_messages=tool,
        several_calls=not (tool or hides_calls)
        and fails(
            *(hello, _said("", one, two), _result("PROBE-R", one), _result("PROBE-S", two)),
            show_calls=True,
        ),
        user_after_tool=not tool and fails(*called, following),
        text_with_call=not tool
        and fails(hello, _said("PROBE-T", one), _result("PROBE-R", one))
        and not fails(hello, _said("PROBE-T"), _said("", one), _result("PROBE-R", one), reply),
        plain_content=parts,
        calls=hides_calls,
    )


def _in_parts(message: _Json) -> _Json:
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def _texts(message: _Json, show_calls: bool) -> list[str]:
    """Return the texts of a test conversation that must appear in a prompt, in this order."""
    calls = [f"CALLED-{call['id']}" for call in message.get("tool_calls", ()) if show_calls]
    return [each for each in (message["content"], *calls) if each]


def _with_arguments(message: _Json, arguments: Callable[[str], Any]) -> _Json:
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        given = arguments(json.dumps({"probed": f"CALLED-{call['id']}"}))
        calls.append({**call, "function": {"name": "probe", "arguments": given}})
    return {**message, "tool_calls": calls}


def fitted(messages: Sequence[_Json], limits: TemplateLimits) -> list[_Json]:
    """Return ``messages``, whose content is text, without what the template does not support."""
    found = list(messages)
    if limits.tool_messages:
        found = [_as_text(message) for message in found]
    if limits.several_calls:
        found = _one_call_each(found)
    if limits.text_with_call:
        found = [each for message in found for each in _text_apart(message)]
    found = _systems(found, limits)
    if limits.user_after_tool:
        found = _merged(found, ("tool", "user"))
    if limits.users_in_a_row:
        found = _merged(found, ("user", "user"))
        if limits.tool_messages:
            found = _merged(found, ("assistant", "assistant"))
    return [_in_parts(message) for message in found] if limits.plain_content else found


def _systems(messages: list[_Json], limits: TemplateLimits) -> list[_Json]:
    start = next((i for i, m in enumerate(messages) if m["role"] != "system"), len(messages))
    first, rest = messages[:start], messages[start:]
    if limits.later_system:
        rest = [{**m, "role": "user"} if m["role"] == "system" else m for m in rest]
    if len(first) > 1 and (limits.several_systems or limits.system):
        first = [{**first[0], "content": PARAGRAPH_BREAK.join(m["content"] for m in first)}]
    if limits.system and first:
        if rest and rest[0]["role"] == "user":
            rest[0] = {
                **rest[0],
                "content": first[0]["content"] + PARAGRAPH_BREAK + rest[0]["content"],
            }
        else:
            rest.insert(0, {**first[0], "role": "user"})
        first = []
    return first + rest


def _merged(messages: list[_Json], roles: tuple[str, str]) -> list[_Json]:
    """Return ``messages`` with each message of the second role merged into a preceding message of
    the first role."""
    runs: list[list[_Json]] = []
    for message in messages:
        if runs and (runs[-1][0]["role"], message["role"]) == roles:
            runs[-1].append(message)
        else:
            runs.append([message])
    return [_joined(run) if len(run) > 1 else run[0] for run in runs]


def _joined(run: list[_Json]) -> _Json:
    """Return the first message of ``run`` with the texts of all. They are joined at once: one after
    the other would take time by the square of their number."""
    texts = filter(None, (message["content"] for message in run))
    return {**run[0], "content": PARAGRAPH_BREAK.join(texts)}


def _as_text(message: _Json) -> _Json:
    """Return tool calls and results as text."""
    if message["role"] in ("tool", "function"):
        name = message.get("name")
        about = f"Result of {name}:\n" if name else "Result:\n"
        return _user(about + message["content"])
    if not message.get("tool_calls"):
        return message
    written = [
        json.dumps(
            {
                "name": call["function"]["name"],
                "arguments": _decoded(call["function"]["arguments"]),
            },
            ensure_ascii=False,
        )
        for call in message["tool_calls"]
    ]
    kept = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**kept, "content": "\n".join(filter(None, [message["content"], *written]))}


def _decoded(arguments: Any) -> Any:
    try:
        return decoded_json(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments


def _one_call_each(messages: list[_Json]) -> list[_Json]:
    """Divide messages with several tool calls: one message per call, followed by its result."""
    found: list[_Json] = []
    position = 0
    while position < len(messages):
        message = messages[position]
        position += 1
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            found.append(message)
            continue
        results = []
        while position < len(messages) and messages[position]["role"] == "tool":
            results.append(messages[position])
            position += 1
        left = _ResultsLeft(results)
        for number, call in enumerate(calls):
            text = message if number == 0 else {"role": "assistant", "content": ""}
            found += [{**text, "tool_calls": [call]}, *left.pop_of(call)]
        found += left.rest()
    return found


class _ResultsLeft:
    """Results of tool calls that follow no call of theirs yet."""

    def __init__(self, results: list[_Json]) -> None:
        self._left = dict(enumerate(results))  # by number, in order
        self._by_id: dict[Any, deque[int]] = {}
        for number, result in self._left.items():
            self._by_id.setdefault(result.get("tool_call_id"), deque()).append(number)

    def pop_of(self, call: _Json) -> list[_Json]:
        """Return the result with the id of ``call``, or the next one if calls have no ids; empty
        if there is none."""
        if "id" not in call:
            return [self._left.pop(next(iter(self._left)))] if self._left else []
        numbers = self._by_id.get(call["id"], deque())
        while numbers:
            if (result := self._left.pop(numbers.popleft(), None)) is not None:
                return [result]
        return []

    def rest(self) -> list[_Json]:
        return list(self._left.values())


def _text_apart(message: _Json) -> list[_Json]:
    if not (message.get("tool_calls") and message["content"]):
        return [message]
    text = {key: value for key, value in message.items() if key != "tool_calls"}
    return [text, {**message, "content": ""}]
