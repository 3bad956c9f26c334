"""Items of newer clients and other servers in a conversation, and tools found in it."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from shared.wire import Submit
from tests.router.conftest import Server, error_of, ok
from tests.router.responses.test_responses import events

CHAT_MODEL = True
FLAGS = ("--max-request-bytes=100000",)
HI = {"role": "user", "content": "hi"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"type": "function", "name": "weather", "description": "Of a city.", "parameters": SCHEMA}
DEFERRED = {**WEATHER, "defer_loading": True}
SERVED = {"type": "namespace", "name": "mcp__maps", "tools": [WEATHER]}
SEARCH = {"type": "tool_search", "execution": "client", "description": "Finds tools."}
CALL = {"type": "tool_search_call", "call_id": "c", "arguments": {"query": "weather"}}
FOUND = {"type": "tool_search_output", "call_id": "c", "execution": "client", "tools": [SERVED]}
HOSTED_CALL: dict[str, Any] = {
    "type": "tool_search_call",
    "call_id": None,
    "execution": "server",
    "arguments": {},
}
HOSTED_FOUND = {"type": "tool_search_output", "call_id": None, "tools": [WEATHER]}
SCREEN = {"type": "computer_screenshot", "image_url": "data:image/png;base64,AAAA"}
FOREIGN: list[tuple[dict[str, Any], str]] = [
    ({"type": "web_search_call", "id": "w", "status": "completed",
      "action": {"type": "search", "query": "news"}}, "news"),
    ({"type": "file_search_call", "id": "f", "queries": ["q"], "results": [{"text": "t"}]}, "q"),
    ({"type": "computer_call", "id": "c", "call_id": "c", "action": {"type": "click"}}, "click"),
    ({"type": "computer_call_output", "call_id": "c", "output": SCREEN}, "computer_screenshot"),
    ({"type": "image_generation_call", "id": "i", "result": "AAAA", "status": "failed"}, "failed"),
    ({"type": "code_interpreter_call", "id": "i", "code": "1 + 1", "outputs": []}, "1 + 1"),
    ({"type": "mcp_list_tools", "server_label": "maps", "tools": [{"name": "f"}]}, "maps"),
    ({"type": "mcp_approval_request", "name": "f", "arguments": "{}"}, "f"),
    ({"type": "mcp_approval_response", "approval_request_id": "a", "approve": False}, "false"),
    ({"type": "mcp_call", "name": "f", "arguments": "{}", "output": "fine"}, "fine"),
    ({"type": "program", "code": "print"}, "print"),
    ({"type": "program_output", "output": "done"}, "done"),
    ({"type": "made_up_later", "content": "something"}, "something"),
]  # fmt: skip


def ask(server: Server, items: list[Any], *tools: Any, **fields: Any) -> httpx.Response:
    return server.post("/v1/responses", input=items, tools=tools, **fields)


@pytest.fixture
def roomy(server: Server) -> Server:
    """Return the server with an engine that has room for tools."""
    server.join("hello", context_length=100_000)
    return server


@pytest.mark.parametrize(("item", "shown"), FOREIGN, ids=[each["type"] for each, _ in FOREIGN])
def test_an_item_of_another_servers_tool_is_told_in_short(
    roomy: Server, item: dict[str, Any], shown: str
) -> None:
    answer = ok(ask(roomy, [HI, item, HI]))
    assert answer.headers["x-left-out-items"] == item["type"]
    prompt = roomy.engine.last_prompt
    assert f"[{item['type']}" in prompt and shown in prompt and "base64" not in prompt
    ok(ask(roomy, [item]))
    stored = ok(ask(roomy, [HI], previous_response_id=answer.json()["id"]))
    assert stored.status_code == 200 and shown in roomy.engine.last_prompt


def test_tools_that_were_found_are_shown_there_and_can_be_called(server: Server) -> None:
    call = json.dumps({"name": "mcp__maps__weather", "arguments": {"city": "Oslo"}})
    engine = server.join(f"<tool_call>\n{call}\n</tool_call>", context_length=100_000)
    ok(ask(server, [HI], SEARCH))
    before = engine.last_prompt
    answer = ok(ask(server, [HI, CALL, FOUND], SEARCH))
    assert "x-left-out-items" not in answer.headers and "x-left-out-tools" not in answer.headers
    after = engine.last_prompt
    assert after.startswith(before), "the prefix stays cached"
    assert '"arguments": {"query": "weather"}' in after and after.count("Of a city.") == 1
    (item,) = answer.json()["output"]
    assert (item["type"], item["namespace"], item["name"]) == (
        *("function_call", "mcp__maps", "weather"),
    )
    ok(ask(server, [HI, CALL, FOUND, CALL, FOUND], SEARCH))
    assert engine.last_prompt.count("Of a city.") == 1


def test_a_search_of_tools_is_a_call_of_its_own_type(server: Server) -> None:
    call = json.dumps({"name": "tool_search", "arguments": {"query": "weather"}})
    server.join(f"<tool_call>\n{call}\n</tool_call>", context_length=100_000)
    *_, added, done, last = events(ok(ask(server, [HI], SEARCH, stream=True)).text)
    assert added["item"]["type"] == done["item"]["type"] == "tool_search_call"
    (item,) = last["response"]["output"]
    assert (item["arguments"], item["execution"]) == ({"query": "weather"}, "client")
    ok(ask(server, [HI, item, {**FOUND, "call_id": item["call_id"]}], SEARCH))


def test_deferred_tools_wait_only_if_the_client_searches_tools(roomy: Server) -> None:
    for tools, is_shown in (
        ([DEFERRED, SEARCH], False),
        ([{**SERVED, "defer_loading": True}, SEARCH], False),
        ([DEFERRED, {"type": "tool_search"}], True),
        ([DEFERRED], True),
    ):
        ok(ask(roomy, [HI], *tools))
        assert ("Of a city." in roomy.engine.last_prompt) == is_shown
    ok(ask(roomy, [HI, HOSTED_CALL, HOSTED_FOUND, HI], SEARCH))
    assert "Of a city." in roomy.engine.last_prompt


def test_additional_tools_are_known_from_their_place_on(roomy: Server) -> None:
    added = {"type": "additional_tools", "role": "developer", "tools": [WEATHER]}
    ok(ask(roomy, [HI], SEARCH))
    before = roomy.engine.last_prompt.removesuffix("<|im_start|>assistant\n")
    ok(ask(roomy, [HI, added, HI], SEARCH))
    assert roomy.engine.last_prompt.startswith(before) and "Of a city." in roomy.engine.last_prompt
    choice = {"type": "function", "name": "weather"}
    ok(ask(roomy, [added, HI], tool_choice=choice))
    assert roomy.engine.last_prompt.startswith("<|im_start|>system\nTools:")
    wrong: dict[str, Any] = {"type": "additional_tools", "tools": [{"type": "function"}]}
    assert error_of(ask(roomy, [HI, wrong]))["param"] == "input[1].tools[0].name"
    wrong = {"type": "additional_tools", "tools": [7]}
    assert error_of(ask(roomy, [HI, wrong]))["param"] == "input[1].tools"


def test_the_last_configuration_update_counts(roomy: Server) -> None:
    updates: list[Any] = [
        {"type": "configuration_update", "reasoning": {"effort": "high"}},
        {"type": "configuration_update", "text": {"format": {"type": "json_object"}}},
    ]
    ok(ask(roomy, [HI, *updates], reasoning={"effort": "low"}))
    assert "(effort high)" in roomy.engine.last_prompt
    grammar = roomy.engine.got(Submit)[-1].grammar
    assert grammar is not None and grammar.kind == "json_schema"


def test_tools_of_unknown_types_are_left_out(roomy: Server) -> None:
    answer = ok(ask(roomy, [HI], {"type": "made_up"}, {"type": "mcp", "server_label": "x"}))
    assert answer.headers["x-left-out-tools"] == "made_up, mcp"
