"""Calls in every format through a whole server: the same in each API, streamed and not.

The weights of a model make it write the calls. One server has a model for each format, of which few
fit in memory at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from router.tokens.parsing.formats import CALL_FORMATS
from tests.e2e.server import Server, events_of, serving
from tests.router.tokens.parsing.writers import WRITERS, Call
from tests.tiny_models import make_reciting

CODE = "if a < b:\n    print('</x>')\n"
CALLS: list[Call] = [("write", {"path": "a.md", "text": CODE}), ("count", {"n": 3})]
STRING = {"type": "string"}
PARAMETERS = {
    "write": {"type": "object", "properties": {"path": STRING, "text": STRING}},
    "count": {"type": "object", "properties": {"n": {"type": "integer"}}},
}
FUNCTIONS = [{"name": name, "parameters": each} for name, each in PARAMETERS.items()]
FIRST = ("qwen3_coder", "gemma4", "kimi_k2", "harmony")
"""The others are as slow as loading a model is."""
PARSERS = [
    name if name in FIRST else pytest.param(name, marks=pytest.mark.slow) for name in CALL_FORMATS
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    texts = {name: WRITERS[name](CALLS) for name in CALL_FORMATS}
    path = make_reciting(tmp_path_factory.mktemp("model"), texts)
    models = "".join(
        f'[[model]]\nid = "{name}"\npath = "{path}"\nmemory_gb = 0.1\ntool_parser = "{name}"\n'
        f'reasoning_parser = "{"harmony" if name == "harmony" else "think"}"\n'
        for name in sorted(CALL_FORMATS, key=lambda name: name not in FIRST)
    )
    file = tmp_path_factory.mktemp("formats") / "server.toml"
    file.write_text(f"fleet_memory_gb = 0.2\nnum_blocks = 64\n{models}")
    with serving(None, "--config", str(file)) as running:
        yield running


def chat(answer: dict[str, Any]) -> list[tuple[str, str]]:
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "tool_calls" and not choice["message"]["content"]
    functions = [call["function"] for call in choice["message"]["tool_calls"]]
    return [(each["name"], each["arguments"]) for each in functions]


def streamed_chat(events: list[dict[str, Any]]) -> list[tuple[str, str]]:
    names: list[str] = []
    arguments: list[str] = []
    choices = [each for event in events if "done" not in event for each in event["choices"]]
    for choice in choices:
        assert not choice["delta"].get("content")
        for call in choice["delta"].get("tool_calls", []):
            if call["index"] == len(names):
                names.append(call["function"]["name"])
                arguments.append("")
            arguments[call["index"]] += call["function"].get("arguments") or ""
    assert choices[-1]["finish_reason"] == "tool_calls"
    return list(zip(names, arguments, strict=True))


def response(answer: dict[str, Any]) -> list[tuple[str, str]]:
    assert answer["status"] == "completed"
    assert {item["type"] for item in answer["output"]} == {"function_call"}
    return [(item["name"], item["arguments"]) for item in answer["output"]]


def streamed_response(events: list[dict[str, Any]]) -> list[tuple[str, str]]:
    whole = events[-1]["response"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    deltas = [e["delta"] for e in events if e["type"].endswith("function_call_arguments.delta")]
    assert done == whole["output"]
    assert "".join(deltas) == "".join(item["arguments"] for item in done)
    return response(whole)


def message(answer: dict[str, Any]) -> list[tuple[str, str]]:
    assert answer["stop_reason"] == "tool_use"
    assert {block["type"] for block in answer["content"]} == {"tool_use"}
    return [(block["name"], json.dumps(block["input"])) for block in answer["content"]]


def streamed_message(events: list[dict[str, Any]]) -> list[tuple[str, str]]:
    starts = [event for event in events if event["type"] == "content_block_start"]
    deltas = [event for event in events if event["type"] == "content_block_delta"]
    return [
        (
            start["content_block"]["name"],
            "".join(e["delta"]["partial_json"] for e in deltas if e["index"] == start["index"]),
        )
        for start in starts
    ]


def ollama(answer: dict[str, Any]) -> list[tuple[str, str]]:
    assert answer["done_reason"] == "stop" and not answer["message"]["content"]
    functions = [call["function"] for call in answer["message"]["tool_calls"]]
    return [(each["name"], json.dumps(each["arguments"])) for each in functions]


def streamed_ollama(lines: list[dict[str, Any]]) -> list[tuple[str, str]]:
    calls = [call for line in lines for call in line["message"].get("tool_calls", [])]
    return ollama({**lines[-1], "message": {"content": "", "tool_calls": calls}})


NESTED = [{"type": "function", "function": each} for each in FUNCTIONS]
APIS: list[tuple[str, dict[str, Any], Any, Any]] = [
    ("/v1/chat/completions", {"tools": NESTED, "max_tokens": 1000}, chat, streamed_chat),
    ("/v1/responses",
     {"tools": [{"type": "function", **each} for each in FUNCTIONS]},
     response, streamed_response),
    ("/v1/messages",
     {"tools": [{"name": each["name"], "input_schema": each["parameters"]} for each in FUNCTIONS],
      "max_tokens": 1000},
     message, streamed_message),
    ("/api/chat", {"tools": NESTED, "options": {"temperature": 0}}, ollama, streamed_ollama),
]  # fmt: skip


@pytest.mark.parametrize("parser", PARSERS)
def test_calls_are_the_same_in_each_api(server: Server, parser: str) -> None:
    asked: Any = [{"role": "user", "content": f"<{parser}>"}]
    for path, fields, whole, streamed in APIS:
        body = {"model": parser, "temperature": 0, **fields}
        body |= {"input": asked} if path == "/v1/responses" else {"messages": asked}
        found = [whole(server.answer(path, **body, stream=False))]
        with server.client.stream("POST", path, json={**body, "stream": True}) as answer:
            assert answer.status_code == 200, answer.read()
            if path == "/api/chat":
                events = list(map(json.loads, answer.iter_lines()))
            else:
                events = list(events_of(answer))
            found.append(streamed(events))
        for calls in found:
            assert [(name, json.loads(text)) for name, text in calls] == CALLS, (path, calls)
