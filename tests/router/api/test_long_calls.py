"""Calls that take long to parse: that is done on a thread."""

from __future__ import annotations

import json

import pytest

from tests.router.conftest import Server, events, ok

FLAGS = ("--tool-parser=pythonic",)
NESTED: list[list[int]] = [[]] * 400
WRITTEN = f"<|tool_call_start|>[look(places={NESTED})]<|tool_call_end|>"
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tokens_per_step", [4, 3000])
def test_a_long_call_is_parsed_beside_the_event_loop(
    tokens_per_step: int, stream: bool, server: Server
) -> None:
    server.join(WRITTEN, tokens_per_step=tokens_per_step, context_length=5000)
    fields = {"tools": [TOOL], "max_tokens": 4000, "parallel_tool_calls": False}
    answer = ok(server.chat("where?", stream=stream, **fields))
    if stream:
        deltas = [event["choices"][0]["delta"] for event in events(answer.text)]
        calls = [call for delta in deltas for call in delta.get("tool_calls") or ()]
        assert {call["index"] for call in calls} == {0}
    else:
        calls = answer.json()["choices"][0]["message"]["tool_calls"]
        assert len(calls) == 1
    arguments = "".join(call["function"]["arguments"] for call in calls)
    assert json.loads(arguments) == {"places": NESTED}
