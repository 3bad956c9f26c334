"""Requests of real coding agents: their form is whole, long texts are cut or replaced."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from bench.serving import sessions
from tests.router.conftest import Server
from tests.router.scripted_engine import ScriptedEngine

REQUESTS = sorted((Path(__file__).parent / "requests").iterdir())
CALL = '<tool_call>\n{"name": "%s", "arguments": {}}\n</tool_call>'


@pytest.fixture(scope="module")
def model_dir(chat_model_dir: Path) -> Path:
    return chat_model_dir


@pytest.fixture(scope="module")
def server(start_server: Callable[..., Server]) -> Server:
    return start_server("--max-prompt-tokens=100000")


@pytest.mark.parametrize("path", REQUESTS, ids=lambda path: path.stem)
def test_a_request_of_an_agent_is_answered_with_a_call(
    server: Server, start_engine: Callable[..., ScriptedEngine], model_dir: Path, path: Path
) -> None:
    body = json.loads(path.read_text()) | {"model": "tiny"}
    names = [tool.get("name") or tool["function"]["name"] for tool in body.get("tools", ())[:1]]
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    text = CALL % names[0] if names else "A title"
    ids = [*tokenizer.encode(text).ids, tokenizer.token_to_id("<|im_end|>")]
    start_engine(server, script=lambda _: ids, context_length=100_000)
    server.wait_ready()
    url = "/v1/" + path.stem.partition("-")[0].replace("chat_", "chat/")
    answer = server.client.post(url, json=body)
    assert answer.status_code == 200, answer.text
    assert "event: error" not in answer.text and '{"error"' not in answer.text
    assert (names[0] if names else '"finish_reason":"stop"') in answer.text
    left_out = "web_search" if "codex" in path.stem else None
    assert answer.headers.get("x-left-out-tools") == left_out


@pytest.mark.parametrize("name", sessions.names())
def test_every_request_of_a_session_is_served(
    server: Server, start_engine: Callable[..., ScriptedEngine], name: str
) -> None:
    requests = sessions.read(name)
    assert len(requests) > 10
    start_engine(server, script=lambda _: [5, 2], context_length=100_000)
    server.wait_ready()
    for number, request in enumerate(requests):
        answer = server.client.post(request.path, json=request.body | {"model": "tiny"})
        assert answer.status_code == 200, (number, answer.text)
        assert "event: error" not in answer.text and '{"error"' not in answer.text
