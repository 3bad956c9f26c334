"""Blocks of newer clients and other servers in a conversation, and tools found in it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.router.conftest import Server, error_of, ok

CHAT_MODEL = True
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
FIND = {"name": "ToolSearch", "input_schema": {"type": "object"}}
WEATHER = {"name": "weather", "description": "Of a city.", "input_schema": SCHEMA}
DEFERRED = {**WEATHER, "defer_loading": True}
USED = {"type": "tool_use", "id": "t1", "name": "ToolSearch", "input": {"query": "weather"}}
FOUND = {
    "type": "tool_result",
    "tool_use_id": "t1",
    "content": [{"type": "tool_reference", "tool_name": "weather"}],
}
SEARCHED = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": [USED]},
    {"role": "user", "content": [FOUND]},
]
RESULT = {"type": "web_search_result", "url": "http://a", "title": "News", "encrypted_content": "x"}
FOREIGN: list[tuple[dict[str, Any], str]] = [
    ({"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "q"}}, "q"),
    ({"type": "web_search_tool_result", "tool_use_id": "s", "content": [RESULT]}, "News"),
    ({"type": "web_fetch_tool_result", "tool_use_id": "s", "content": {"url": "http://b"}}, "b"),
    ({"type": "mcp_tool_use", "id": "m", "name": "f", "server_name": "s", "input": {"a": 1}}, "f"),
    ({"type": "mcp_tool_result", "tool_use_id": "m", "content": [{"type": "text", "text": "ok"}]},
     "ok"),
    ({"type": "tool_search_tool_result", "tool_use_id": "s", "content": {"tool_references": []}},
     "tool_search_tool_result"),
    ({"type": "advisor_tool_result", "tool_use_id": "s", "content": {"text": "good"}}, "good"),
    ({"type": "container_upload", "file_id": "f"}, "container_upload"),
    ({"type": "fallback"}, "fallback"),
    ({"type": "made_up_later", "content": "something"}, "something"),
]  # fmt: skip


def ask(server: Server, messages: list[Any], **fields: Any) -> Any:
    return server.post("/v1/messages", max_tokens=20, messages=messages, **fields)


@pytest.mark.parametrize(("block", "shown"), FOREIGN, ids=[each["type"] for each, _ in FOREIGN])
def test_a_block_of_another_servers_tool_is_told_in_short(
    served: Server, block: dict[str, Any], shown: str
) -> None:
    for role in ("assistant", "user"):
        turns = [{"role": "user", "content": "hi"}, {"role": role, "content": [block]}]
        answer = ok(ask(served, [*turns, {"role": "user", "content": "go on"}]))
        assert answer.headers["x-left-out-items"] == block["type"]
        prompt = served.engine.last_prompt
        assert f"[{block['type']}" in prompt and shown in prompt


def test_what_has_a_meaning_is_not_left_out(served: Server) -> None:
    found: dict[str, Any] = {
        "type": "search_result",
        "source": "http://a",
        "title": "T",
        "content": [],
    }
    found["content"] = [{"type": "text", "text": "body"}]
    summary = {"type": "compaction", "content": "all so far"}
    answer = ok(ask(served, [{"role": "user", "content": [found, summary]}]))
    assert "x-left-out-items" not in answer.headers
    assert "T\nhttp://a\nbody\n\nall so far" in served.engine.last_prompt


@pytest.mark.parametrize("kind", ["video", "input_audio", "file"])
def test_content_that_a_question_may_be_about_is_refused(served: Server, kind: str) -> None:
    error = error_of(ask(served, [{"role": "user", "content": [{"type": kind}]}]))
    assert kind in error["message"]


def test_a_deferred_tool_is_shown_where_it_was_found(server: Server) -> None:
    server.join("hello", context_length=4096)

    def prompt(messages: list[Any], *tools: dict[str, Any]) -> str:
        ok(ask(server, messages, tools=list(tools)))
        return server.engine.last_prompt

    before = prompt(SEARCHED[:1], FIND, DEFERRED)
    after = prompt(SEARCHED, FIND, DEFERRED)
    assert "Of a city." not in before
    assert after.startswith(before), "the prefix stays cached"
    assert after.count("Of a city.") == 1
    again = prompt([*SEARCHED, *SEARCHED[1:]], FIND, DEFERRED)
    assert again.count("Of a city.") == 1 and again.startswith(after)
    assert "Of a city." in prompt(SEARCHED[:1], DEFERRED), "nothing could ever find it"


def test_a_deferred_tool_can_be_called(server: Server) -> None:
    call = '{"name": "weather", "arguments": {"city": "Oslo"}}'
    server.join(f"<tool_call>\n{call}\n</tool_call>", context_length=4096)
    chosen = {"type": "tool", "name": "weather"}
    given: Any = {"max_tokens": 200, "messages": SEARCHED, "tools": [FIND, DEFERRED]}
    body = ok(server.post("/v1/messages", **given, tool_choice=chosen)).json()
    (call,) = body["content"]
    assert (call["name"], call["input"]) == ("weather", {"city": "Oslo"})


def test_tools_that_an_mcp_server_runs_are_left_out(served: Server) -> None:
    mcp = {"type": "mcp_toolset", "mcp_server_name": "s"}
    answer = ok(ask(served, SEARCHED[:1], tools=[mcp, WEATHER]))
    assert answer.headers["x-left-out-tools"] == "mcp_toolset"
