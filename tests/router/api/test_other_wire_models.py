"""Every answer and event beside the models of Ollama's and Mistral's own packages.

Nulls are compared in `tests.router.api.test_wire_models`. Mistral's package reads OpenAI's chats
and completions, but for two things that OpenAI's own clients would read wrongly: Mistral sends each
call in one event, with its name, and each log-probability with the token's id.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from mistralai.client.models import ChatCompletionResponse, CompletionChunk, ModelList
from ollama import (
    ChatResponse,
    GenerateResponse,
    ListResponse,
    ProcessResponse,
    ShowResponse,
)
from pydantic import BaseModel

from tests.router.api.test_wire_models import CALLED, CHAT_TOOL, HI, TEXT, data_of
from tests.router.conftest import Server, ok

CHAT_MODEL = True
ALWAYS = {"model", "created_at", "done"}
FIGURES = {
    *("done_reason", "total_duration", "load_duration", "prompt_eval_count"),
    *("prompt_eval_duration", "eval_count", "eval_duration"),
}
"""What Ollama's last object has; its package takes all of them for optional."""


def check(model: type[BaseModel], sent: Any) -> None:
    """Check that ``sent`` is what ``model`` says, without any conversion."""
    model.model_validate_json(json.dumps(sent), strict=True)


@pytest.mark.parametrize("says", [TEXT, CALLED, "Well. " + CALLED, ""])
def test_ollamas_chats_and_answers_are_those_of_its_package(server: Server, says: str) -> None:
    server.join(says, context_length=8192)
    scored = {"model": "tiny", "logprobs": True, "top_logprobs": 2}
    chat = {**scored, "messages": HI, "tools": [CHAT_TOOL]}
    for path, model, body in (
        ("/api/chat", ChatResponse, chat),
        ("/api/generate", GenerateResponse, {**scored, "prompt": "hi"}),
    ):
        for stream in (False, True):
            lines = ok(server.post(path, stream=stream, **body)).text.splitlines()
            found = [json.loads(line) for line in lines]
            for each in found:
                check(model, each)
                assert set(each) >= (ALWAYS | FIGURES if each["done"] else ALWAYS)
            assert [each["done"] for each in found] == [False] * (len(found) - 1) + [True]
            assert any(each.get("logprobs") for each in found) or not says


def test_ollamas_lists_are_those_of_its_package(server: Server) -> None:
    server.join("hello", context_length=8192)
    for path, model in (("/api/tags", ListResponse), ("/api/ps", ProcessResponse)):
        listed = ok(server.client.get(path)).json()
        assert len(listed["models"]) == 1
        check(model, listed)
    check(ShowResponse, ok(server.post("/api/show", model="tiny")).json())


@pytest.mark.parametrize("says", [TEXT, CALLED, "Well. " + CALLED, ""])
def test_mistrals_package_reads_chats(server: Server, says: str) -> None:
    server.join(says, context_length=8192)
    body: dict[str, Any] = {"messages": HI, "tools": [CHAT_TOOL]}
    whole = ok(server.post("/v1/chat/completions", **body)).json()
    check(ChatCompletionResponse, whole)
    body |= {"stream": True, "stream_options": {"include_usage": True}, "return_progress": True}
    chunks = list(data_of(ok(server.post("/v1/chat/completions", **body)).text))
    assert len(chunks) > 3
    for chunk in chunks:
        for choice in chunk["choices"]:
            for call in choice["delta"].get("tool_calls") or ():
                call["function"] = {"name": "", "arguments": "", **call["function"]}
        check(CompletionChunk, chunk)


def test_mistrals_package_reads_the_list_of_models(server: Server) -> None:
    server.join("hello", context_length=8192)
    check(ModelList, ok(server.client.get("/v1/models")).json())
