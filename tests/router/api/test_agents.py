"""Requests of real coding agents: their form is whole, long texts are cut or replaced."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.serving import sessions
from tests.router.conftest import Server, ok

CHAT_MODEL = True
FLAGS = ("--max-prompt-tokens=100000",)
REQUESTS = sorted((Path(__file__).parent / "requests").iterdir())
CALL = '<tool_call>\n{"name": "%s", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize("path", REQUESTS, ids=lambda path: path.stem)
def test_a_request_of_an_agent_is_answered_with_a_call(server: Server, path: Path) -> None:
    body = json.loads(path.read_text()) | {"model": "tiny"}
    names = [tool.get("name") or tool["function"]["name"] for tool in body.get("tools", ())[:1]]
    server.join(CALL % names[0] if names else "A title", context_length=100_000)
    url = "/v1/" + path.stem.partition("-")[0].replace("chat_", "chat/")
    answer = ok(server.client.post(url, json=body))
    assert "event: error" not in answer.text and '{"error"' not in answer.text
    assert (names[0] if names else '"finish_reason":"stop"') in answer.text
    left_out = "web_search" if "codex" in path.stem else None
    assert answer.headers.get("x-left-out-tools") == left_out


@pytest.mark.parametrize("name", sessions.names())
def test_every_request_of_a_session_is_served(server: Server, name: str) -> None:
    requests = sessions.read(name)
    assert len(requests) > 10
    server.join(script=lambda _: [5, 2], context_length=100_000)
    for request in requests:
        answer = ok(server.client.post(request.path, json=request.body | {"model": "tiny"}))
        assert "event: error" not in answer.text and '{"error"' not in answer.text
