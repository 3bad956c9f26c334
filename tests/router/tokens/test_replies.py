"""One reply with reasoning, text and calls in Anthropic's Messages and OpenAI's Responses."""

from __future__ import annotations

from typing import Any

import pytest

from shared.wire import Submit
from tests.router.anthropic import test_anthropic
from tests.router.conftest import Server, ok
from tests.router.responses import test_responses
from tests.router.scripted_engine import ScriptedEngine

CHAT_MODEL = True
FLAGS = ()
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
REPLY = f"<think>\nwhich 🌍?\n</think>\n\nAdding 日本.\n{CALL}\n{CALL.replace('2', '3')}"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"name": "add", "input_schema": SCHEMA}
FUNCTION = {"type": "function", "name": "add", "parameters": SCHEMA}
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
def engine(server: Server) -> ScriptedEngine:
    return server.join(REPLY, context_length=4096)


def accumulated(events: list[Any]) -> list[Any]:
    """Return the content blocks of a Messages stream, with their deltas joined."""
    blocks: list[Any] = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append({**event["content_block"], "partial": ""})
        if event["type"] != "content_block_delta":
            continue
        delta, block = event["delta"], blocks[event["index"]]
        for name in ("text", "thinking", "signature"):
            if name in delta:
                block[name] += delta[name]
        block["partial"] += delta.get("partial_json", "")
    return blocks


def set_pace(engine: ScriptedEngine, step: int) -> None:
    """Send ``step`` tokens at a time; single ones so slowly that they come as events of their
    own."""
    engine.behaviour.tokens_per_step = step
    engine.behaviour.step_s = 0.01 if step == 1 else 0.002


@pytest.mark.parametrize(("step", "choice"), [(1, "auto"), (1, "any"), (3, "auto"), (200, "any")])
def test_a_message_has_blocks_of_each_kind(served: Server, step: int, choice: str) -> None:
    """Calls are streamed while they are generated."""
    set_pace(served.engine, step)
    fields: dict[str, Any] = {"max_tokens": 300, "tools": [TOOL], "tool_choice": {"type": choice}}
    message = test_anthropic.ask(served, **fields).json()
    thinking, text, first, second = message["content"]
    assert (thinking["type"], thinking["thinking"]) == ("thinking", "which 🌍?")
    assert (text["type"], text["text"]) == ("text", "Adding 日本.")
    assert first["type"] == second["type"] == "tool_use"
    assert first["input"] == {"a": 1, "b": 2} and second["input"] == {"a": 1, "b": 3}
    assert message["stop_reason"] == "tool_use"
    assert message["usage"]["output_tokens_details"]["thinking_tokens"] > 0
    events = test_anthropic.streamed(served, **fields)
    deltas = [event for event in events if event.get("delta", {}).get("partial_json")]
    # Events that a busy machine is late with come as one.
    assert len(deltas) >= (3 if step == 1 else 2)
    *streamed, one, two = accumulated(events)
    for block, whole in zip(streamed, (thinking, text), strict=True):
        assert {name: block[name] for name in whole} == whole
    assert (one["partial"], two["partial"]) == ('{"a": 1, "b": 2}', '{"a": 1, "b": 3}')
    assert one["id"].startswith("toolu_") and one["id"] != two["id"]


@pytest.mark.parametrize(
    ("step", "choice"), [(1, "auto"), (1, "required"), (3, "auto"), (200, "required")]
)
def test_a_response_has_items_of_each_kind(served: Server, step: int, choice: str) -> None:
    set_pace(served.engine, step)
    fields = {"tools": [FUNCTION], "tool_choice": choice}
    output = test_responses.ask(served, **fields).json()["output"]
    reasoning, message, first, second = output
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "which 🌍?"}]
    assert message["content"][0]["text"] == "Adding 日本."
    assert (first["name"], first["arguments"]) == ("add", '{"a": 1, "b": 2}')
    assert first["call_id"] != second["call_id"]
    events = test_responses.streamed(served, **fields)
    deltas = [e for e in events if e["type"] == "response.function_call_arguments.delta"]
    # Events that a busy machine is late with come as one.
    assert len(deltas) >= (3 if step == 1 else 2)
    assert "".join(delta["delta"] for delta in deltas) == '{"a": 1, "b": 2}{"a": 1, "b": 3}'
    streamed = events[-1]["response"]["output"]
    assert list(map(bare, streamed)) == list(map(bare, output))
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == streamed


def bare(item: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in item.items() if name not in ("id", "call_id")}


def test_a_message_that_is_sent_back_keeps_its_tokens(served: Server) -> None:
    fields: dict[str, Any] = {"max_tokens": 300, "tools": [TOOL], "cache_salt": "messages"}
    content = test_anthropic.ask(served, HI, **fields).json()["content"]
    ids = [block["id"] for block in content if block["type"] == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": each, "content": "3"} for each in ids]
    turns = ({"role": "assistant", "content": content}, {"role": "user", "content": results})
    ok(test_anthropic.ask(served, [*HI, *turns], **fields))
    check_continued(served.engine)


def test_a_response_that_is_continued_keeps_its_tokens(served: Server) -> None:
    fields = {"tools": [FUNCTION], "cache_salt": "responses"}
    first = test_responses.ask(served, **fields).json()
    ids = [item["call_id"] for item in first["output"] if item["type"] == "function_call"]
    results = [{"type": "function_call_output", "call_id": each, "output": "3"} for each in ids]
    ok(test_responses.ask(served, results, previous_response_id=first["id"], **fields))
    check_continued(served.engine)


def check_continued(engine: ScriptedEngine) -> None:
    first, second = engine.got(Submit)
    known = [*first.token_ids, *engine.behaviour.script(first)]
    assert second.token_ids[: len(known)] == known
