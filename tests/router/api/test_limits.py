"""Limits that nobody has set: of prompts, bodies and answers."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from shared.wire import Submit
from tests.router.conftest import Server, StartServer, eventually, ok
from tests.router.scripted_engine import ScriptedEngine

CHAT_MODEL = True
FLAGS = ()
WORD = "hello "


def turn(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


APIS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": turn("%")},
    "/v1/messages": {"messages": turn("%"), "max_tokens": 64_000},
    "/v1/responses": {"input": "%"},
    "/api/chat": {"model": "tiny", "messages": turn("%"), "stream": False},
}
THOUGHT = "<think>\n" + "why? " * 400 + "\n</think>\n\nhello world"


def asked(path: str, text: str) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(json.dumps(APIS[path]).replace("%", text))
    return body


def text_of(path: str, body: dict[str, Any]) -> str:
    match path:
        case "/v1/chat/completions":
            return str(body["choices"][0]["message"]["content"])
        case "/v1/messages":
            return str(body["content"][-1]["text"])
        case "/v1/responses":
            return str(body["output"][-1]["content"][0]["text"])
    return str(body["message"]["content"])


@pytest.fixture
def roomy(server: Server) -> ScriptedEngine:
    return server.join(THOUGHT, context_length=100_000, tokens_per_step=500)


@pytest.mark.parametrize("path", APIS)
def test_reasoning_does_not_use_up_an_answer_without_a_limit(
    server: Server, roomy: ScriptedEngine, path: str
) -> None:
    body = asked(path, "hi")
    if path == "/v1/messages":
        body["max_tokens"] = 10**9
    answer = ok(server.client.post(path, json=body)).json()
    assert text_of(path, answer) == "hello world"


def test_an_answer_without_reasoning_has_the_usual_limit(
    server: Server, roomy: ScriptedEngine, start_server: StartServer
) -> None:
    ok(server.chat("hi", enable_thinking=False))
    ok(server.complete("hi"))
    assert [submit.max_tokens for submit in roomy.got(Submit)] == [512, 512]
    own = start_server("--default-max-tokens=40")
    engine = own.join(THOUGHT, context_length=100_000)
    ok(own.chat("hi"))
    ok(own.post("/v1/responses", input="hi"))
    assert [submit.max_tokens for submit in engine.got(Submit)] == [40, 40]


@pytest.mark.parametrize("path", APIS)
def test_a_conversation_of_60000_tokens_fits_in_a_large_context(
    server: Server, roomy: ScriptedEngine, path: str
) -> None:
    ok(server.client.post(path, json=asked(path, WORD * 30_000), timeout=120))
    assert 60_000 <= len(roomy.got(Submit)[-1].token_ids) < 100_000


def test_a_body_may_have_a_few_bytes_for_each_token(server: Server, roomy: ScriptedEngine) -> None:
    escaped = json.dumps({"messages": turn("x"), "unknown": "\u00e9" * 200_000})
    assert 1.1e6 < len(escaped) < 1.6e6
    ok(server.client.post("/v1/chat/completions", content=escaped, headers=JSON))
    large = json.dumps({"messages": turn("x"), "unknown": "x" * 1_700_000})
    refused = server.client.post("/v1/chat/completions", content=large, headers=JSON)
    assert refused.status_code == 413


def test_a_large_body_has_no_more_values_than_a_small_one(
    server: Server, roomy: ScriptedEngine
) -> None:
    values = {"messages": turn("x"), "unknown": [[]] * 529_000}
    many = json.dumps(values, separators=(",", ":"))
    assert len(many) < 1_600_000
    refused = server.client.post("/v1/chat/completions", content=many, headers=JSON)
    assert refused.status_code == 413 and "values" in refused.json()["error"]["message"]


JSON = {"content-type": "application/json"}


def error_code(path: str, answer: httpx.Response) -> str:
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    if path == "/v1/messages":
        assert error["message"].startswith("prompt is too long: ")
        return str(error["type"])
    if path == "/api/chat":
        assert "context" in error
        return "text"
    return str(error["code"])


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("/v1/chat/completions", "context_length_exceeded"),
        ("/v1/messages", "invalid_request_error"),
        ("/v1/responses", "context_length_exceeded"),
        ("/api/chat", "text"),
    ],
)
def test_a_prompt_over_the_engines_context_is_told_as_each_api_does(
    server: Server, path: str, code: str
) -> None:
    server.join("hello", context_length=300)
    eventually(lambda: server.client.get("/v1/models").json()["data"][0]["context_length"] == 300)
    body = asked(path, WORD * 500)
    assert error_code(path, server.client.post(path, json=body)) == code
    streamed = server.client.post(path, json=body | {"stream": True})
    assert error_code(path, streamed) == code


@pytest.mark.parametrize("path", APIS)
def test_an_answer_ends_where_the_context_does(server: Server, path: str) -> None:
    engine = server.join("hello " * 600, context_length=300)
    body = asked(path, "hi")
    for name in ("max_tokens", "max_output_tokens"):
        if path != "/api/chat" and (name == "max_tokens") == (path != "/v1/responses"):
            body[name] = 32_000
    answer = ok(server.client.post(path, json=body)).json()
    submit = engine.got(Submit)[-1]
    assert submit.max_tokens + len(submit.token_ids) == 300
    ends = json.dumps(answer)
    assert any(each in ends for each in ('"length"', "max_output_tokens", "window_exceeded"))
