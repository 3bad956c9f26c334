"""Requests of real coding agents: their form is whole, long texts are cut or replaced."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.serving import sessions
from tests.router.conftest import Server, ok

CHAT_MODEL = True
FLAGS = ("--max-prompt-tokens=100000",)
CALL = '<tool_call>\n{"name": "%s", "arguments": {}}\n</tool_call>'
REQUESTS = {name: sessions.read(name) for name in sessions.names()}
REQUESTS["single"] = [
    sessions.Request("main", "/v1/messages", json.loads(path.read_text()))
    for path in (Path(__file__).parent / "requests").iterdir()
]


@pytest.mark.parametrize("agent", REQUESTS)
def test_each_request_of_an_agent_is_answered_with_a_call(server: Server, agent: str) -> None:
    engine = server.join("", context_length=100_000)
    for request in REQUESTS[agent]:
        tools = request.body.get("tools", ())
        names = [tool.get("name") or tool["function"]["name"] for tool in tools[:1]]
        engine.says(CALL % names[0] if names else "A title")
        answer = ok(server.client.post(request.path, json=request.body | {"model": "tiny"}))
        assert "event: error" not in answer.text and '{"error"' not in answer.text
        assert (names[0] if names else '"finish_reason":"stop"') in answer.text
        is_left_out = any(tool.get("type") == "web_search" for tool in tools)
        assert answer.headers.get("x-left-out-tools") == ("web_search" if is_left_out else None)
    assert len(REQUESTS[agent]) > 1
    assert agent != "codex" or is_left_out
