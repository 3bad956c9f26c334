"""Every answer and event beside the models of the original APIs' own packages.

A field that the original leaves out must not be null: clients in other languages take a missing
field for optional, and refuse a null. The packages' models accept both, so the nulls that the
original APIs send are listed here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import CompactedResponse, Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.router.conftest import Server, ok

CHAT_MODEL = True
HI = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
ADD = {"name": "add", "description": "Adds.", "parameters": SCHEMA}
CHAT_TOOL = {"type": "function", "function": ADD}
RESPONSE_TOOL = {"type": "function", **ADD}
CUSTOM = {"type": "custom", "name": "note"}
SEARCH = {"type": "tool_search", "execution": "client"}
MESSAGES_TOOL = {"name": "add", "input_schema": SCHEMA}
TEXT = "<think>\nwhich?\n</think>\n\nhello world"
CALLS = (("add", {"a": 1}), ("note", {"input": "x"}), ("tool_search", {"query": "q"}))
CALLED = "".join(
    f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'
    for name, arguments in CALLS
)
CHAT: dict[str, Any] = {"messages": HI, "tools": [CHAT_TOOL], "logprobs": True, "top_logprobs": 1}
ANSWER: dict[str, Any] = {"input": "hi", "tools": [RESPONSE_TOOL, CUSTOM, SEARCH]}
COMPACT: dict[str, Any] = {"input": [*HI, {"type": "compaction_trigger"}]}
MESSAGE: dict[str, Any] = {"messages": HI, "max_tokens": 400, "tools": [MESSAGES_TOOL]}
SUMMARY = {"reasoning": {"summary": "auto"}, "include": ["reasoning.encrypted_content"]}
PROGRESS = {"return_progress": True}
USAGE = {"stream_options": {"include_usage": True}}
REQUESTS: list[tuple[str, Any, Any, dict[str, Any]]] = [
    ("/v1/chat/completions", ChatCompletion, ChatCompletionChunk, CHAT),
    (
        "/v1/chat/completions",
        ChatCompletion,
        ChatCompletionChunk,
        {"messages": HI, **USAGE, **PROGRESS},
    ),
    (
        "/v1/completions",
        Completion,
        Completion,
        {"prompt": "hi", "logprobs": 1, **USAGE, **PROGRESS},
    ),
    ("/v1/responses", Response, ResponseStreamEvent, ANSWER | {"top_logprobs": 1}),
    ("/v1/responses", Response, ResponseStreamEvent, ANSWER | SUMMARY),
    ("/v1/responses", Response, ResponseStreamEvent, ANSWER | {"max_output_tokens": 2}),
    ("/v1/responses", Response, ResponseStreamEvent, COMPACT),
    ("/v1/messages", Message, RawMessageStreamEvent, MESSAGE),
    ("/v1/messages", Message, RawMessageStreamEvent, MESSAGE | {"max_tokens": 2}),
]
_OF_RESPONSES = {
    *("completed_at", "error", "incomplete_details", "instructions", "max_output_tokens"),
    *("max_tool_calls", "previous_response_id", "prompt_cache_key", "safety_identifier"),
    *("temperature", "top_p", "usage", "user", "reasoning.effort", "reasoning.summary"),
    *("text.verbosity", "tools[].strict", "tools[].parameters", "output[].encrypted_content"),
}
SENT_NULLS = {
    "/v1/chat/completions": {
        *("choices[].logprobs", "choices[].logprobs.refusal", "choices[].finish_reason", "usage"),
        *("choices[].message.refusal", "choices[].message.content"),
    },
    "/v1/completions": {"choices[].logprobs", "choices[].finish_reason", "usage"},
    "/v1/responses": {
        *_OF_RESPONSES,
        *(f"response.{name}" for name in _OF_RESPONSES),
        "item.encrypted_content",
    },
    "/v1/messages": {
        *("stop_reason", "stop_sequence", "message.stop_reason", "message.stop_sequence"),
        "delta.stop_sequence",
    },
    "/v1/models": {"data[].parent", "data[].draft_saved_s"},
}
"""By path of the endpoint."""


def nulls(value: Any, path: str = "") -> Iterator[str]:
    if value is None:
        yield path
    elif isinstance(value, dict):
        for name, each in value.items():
            yield from nulls(each, f"{path}.{name}" if path else name)
    elif isinstance(value, list):
        for each in value:
            yield from nulls(each, f"{path}[]")


def check(path: str, model: Any, found: Any) -> None:
    assert not set(nulls(found)) - SENT_NULLS[path]
    if model is Completion:  # OpenAI's chunks have a null here too, against the package's type
        for choice in found["choices"]:
            choice["finish_reason"] = choice["finish_reason"] or "stop"
    if found.get("type") != "ping":  # the package drops it
        TypeAdapter(model).validate_python(found)


def data_of(text: str) -> Iterator[Any]:
    for line in text.splitlines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


@pytest.mark.parametrize("says", [TEXT, CALLED, "Well. " + CALLED, ""])
def test_answers_and_events_are_those_of_the_original(server: Server, says: str) -> None:
    server.join(says, context_length=8192)
    for path, whole, event, body in REQUESTS:
        sent = {name: value for name, value in body.items() if name != "stream_options"}
        check(path, whole, ok(server.client.post(path, json=sent)).json())
        streamed = list(data_of(ok(server.client.post(path, json={**body, "stream": True})).text))
        assert len(streamed) > 1
        for each in streamed:
            check(path, event, each)


def test_other_objects_are_those_of_the_original(server: Server) -> None:
    server.join("hello", context_length=8192)
    models = server.client.get("/v1/models").json()
    assert not set(nulls(models)) - SENT_NULLS["/v1/models"]
    for each in models["data"]:
        TypeAdapter(Model).validate_python(each)
    compacted = ok(server.post("/v1/responses/compact", input="hi")).json()
    message, _ = compacted["output"]
    assert (message["type"], message["role"]) == ("message", "user")
    compacted["output"] = compacted["output"][1:]  # the package's type lacks the user's messages
    check("/v1/responses", CompactedResponse, compacted)
    counted = ok(server.post("/v1/messages/count_tokens", messages=HI)).json()
    check("/v1/messages", MessageTokensCount, counted)


@pytest.mark.parametrize("says", [TEXT, CALLED, ""])
def test_ollamas_answers_have_no_nulls_at_all(server: Server, says: str) -> None:
    server.join(says, context_length=8192)
    for path, body in (
        ("chat", {"messages": HI, "tools": [CHAT_TOOL]}),
        ("generate", {"prompt": "hi"}),
    ):
        for stream in (False, True):
            answer = ok(server.post(f"/api/{path}", model="tiny", stream=stream, **body))
            for line in answer.text.splitlines():
                assert not list(nulls(json.loads(line)))
    for path in ("/api/tags", "/api/ps", "/api/version"):
        assert not list(nulls(server.client.get(path).json()))
    assert not list(nulls(server.post("/api/show", model="tiny").json()))
