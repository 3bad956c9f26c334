"""Anthropic's Messages API over a scripted engine."""

from __future__ import annotations

from typing import Any

import httpx
import msgspec
import pytest

from router.anthropic.output import ContentBlockBuilder
from router.anthropic.schemas import ContentBlockParam, CountTokensRequest, MessageParam
from router.anthropic.translation import with_notes
from router.generation.choice import OutputDelta
from router.tokens.reply_parser import CallDelta, ReplyDelta
from shared.wire import Submit
from tests.router.conftest import Server, StartServer, error_of, named_events, ok
from tests.router.scripted_engine import ScriptedEngine

HI = [{"role": "user", "content": "hi"}]
CACHED = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
USE = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
SEARCH = {"type": "web_search_20250305", "name": "web_search"}
ADD = {"name": "add", "input_schema": {"type": "object", "properties": {}}}
PLAIN = {"content-type": "text/plain"}


def said(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


def user(block: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [block]}]}


def ask(server: Server, messages: list[Any] | None = None, **fields: Any) -> httpx.Response:
    usual = {"max_tokens": 50, "messages": HI if messages is None else messages}
    return server.post("/v1/messages", **{**usual, **fields})


def streamed(server: Server, **fields: Any) -> list[Any]:
    return named_events(ok(ask(server, stream=True, **fields)).text)


def test_an_answer_is_a_message(served: Server) -> None:
    served.engine.behaviour.cached_tokens = 5
    answer = ok(ask(served, system="be kind", model="tiny"))
    (submit,) = served.engine.got(Submit)
    body = answer.json()
    assert body.pop("id").startswith("msg_")
    usage: dict[str, Any] = {"input_tokens": len(submit.token_ids) - 5, "output_tokens": 5}
    usage |= {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 5}
    usage |= {"output_tokens_details": {"thinking_tokens": 0}, "service_tier": "standard"}
    block = {"type": "text", "text": "hello world"}
    message = {"type": "message", "role": "assistant", "model": "tiny", "content": [block]}
    assert body == message | {"stop_reason": "end_turn", "stop_sequence": None, "usage": usage}
    assert answer.headers["request-id"] == answer.headers["x-request-id"]


def test_a_last_assistant_message_is_continued(server: Server, engine: ScriptedEngine) -> None:
    engine.says('"a": 1}')
    answer = ok(ask(server, [*HI, {"role": "assistant", "content": "{"}]))
    assert answer.json()["content"][0]["text"] == '"a": 1}'
    assert engine.last_prompt.endswith("<|assistant|>{")


def test_a_stream_has_anthropics_event_order(served: Server) -> None:
    served.engine.behaviour.cached_tokens = 5
    start, opened, ping, *deltas, stop, delta, last = streamed(served)
    (submit,) = served.engine.got(Submit)
    assert start["type"] == "message_start"
    message, count = start["message"], len(submit.token_ids)
    assert (message["content"], message["stop_reason"]) == ([], None)
    assert message["usage"]["input_tokens"] == count
    block = {"type": "text", "text": ""}
    assert opened == {"type": "content_block_start", "index": 0, "content_block": block}
    assert ping == {"type": "ping"}
    assert {(each["type"], each["delta"]["type"]) for each in deltas} == {
        ("content_block_delta", "text_delta")
    }
    assert "".join(each["delta"]["text"] for each in deltas) == "hello world"
    assert stop == {"type": "content_block_stop", "index": 0}
    assert delta["type"] == "message_delta"
    assert delta["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    usage = {"input_tokens": count - 5, "output_tokens": 5, "cache_read_input_tokens": 5}
    assert usage.items() <= delta["usage"].items()
    assert last == {"type": "message_stop"}


def test_the_stop_sequence_found_is_reported(served: Server) -> None:
    fields: dict[str, Any] = {"stop_sequences": ["xyz", " wor", "ld"]}
    body = ask(served, **fields).json()
    assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", " wor")
    assert body["content"][0]["text"] == "hello"
    delta = streamed(served, **fields)[-2]["delta"]
    assert delta == {"stop_reason": "stop_sequence", "stop_sequence": " wor"}


def test_the_stop_reason_names_the_limit_reached(server: Server, engine: ScriptedEngine) -> None:
    engine.says("hello" * 600)
    assert ask(server, max_tokens=3).json()["stop_reason"] == "max_tokens"
    long = ask(server, max_tokens=9999).json()
    assert long["stop_reason"] == "model_context_window_exceeded"


def test_an_empty_answer_has_no_block(server: Server, engine: ScriptedEngine) -> None:
    engine.says("")
    assert ask(server).json()["content"] == []
    types = [event["type"] for event in streamed(server)]
    assert types == ["message_start", "message_delta", "message_stop"]


def test_blocks_become_the_messages_of_a_conversation(served: Server) -> None:
    calls = [
        {"type": "thinking", "thinking": "hmm", "signature": "s"},
        {"type": "redacted_thinking", "data": "xxxx"},
        text("two"),
        {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"a": 1}, **CACHED},
        {"type": "tool_use", "id": "toolu_2", "name": "f", "input": {}},
    ]
    failed = {"tool_use_id": "toolu_2", "is_error": True, "content": [text("four")]}
    results = [
        {"type": "tool_result", "tool_use_id": "toolu_1", "content": "three", **CACHED},
        {"type": "tool_result", **failed},
        *(text("five"), text("six")),
    ]
    turns = (("user", [text("one") | CACHED]), ("assistant", calls), ("user", results))
    messages = [{"role": role, "content": content} for role, content in turns]
    system = [text("zero") | CACHED, text("more")]
    ok(ask(served, messages, system=system, cache_control={"type": "ephemeral"}))
    assert served.engine.last_prompt == (
        "<|system|>zero\n\nmore\n<|user|>one\n<|assistant|>two"
        '{"name": "f", "arguments": {"a": 1}}\n{"name": "f", "arguments": {}}\n'
        "<|tool|>three\n<|tool|>Error: four\n<|user|>five\n\nsix\n<|assistant|>"
    )


def test_ways_to_show_an_answer_may_be_unknown(served: Server) -> None:
    thinking = {"type": "adaptive", "display": "updates"}
    ok(ask(served, thinking=thinking, service_tier="flex"))
    reasoning, text = {"summary": "brief"}, {"verbosity": "tiny"}
    ok(served.post("/v1/responses", input="hi", reasoning=reasoning, text=text))


def test_tools_that_anthropic_runs_are_left_out(served: Server) -> None:
    tools = [{"type": "web_search_20250305", "name": "web_search", "max_uses": 3}, ADD]
    answer = ok(ask(served, tools=tools))
    assert answer.headers["x-left-out-tools"] == "web_search_20250305"
    assert "x-left-out-tools" not in ask(served, tools=[ADD]).headers


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"temperature": 1.5}, "temperature"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [*HI, {"role": "assistant", "content": [USE]}]}, "messages[1]"),
        (user({"type": "image", "source": {"type": "base64", "data": "AA"}}), "'image'"),
        (user({"type": "image"}), "source"),
        (user({"type": "document", "source": {"type": "base64", "data": "AA"}}), "type 'pdf'"),
        (user({"type": "document"}), "'document'"),
        (user({"type": "text"}), "content[0].text"),
        (user({"type": "tool_result"}), "messages[0].content[0].tool_use_id"),
        ({"messages": [*HI, {"role": "system", "content": [{"type": "image"}]}, *HI]},
         "'messages[1].content[0]'"),
        ({"system": [text("x"), {"type": "text"}]}, "'system[1].text'"),
        ({"tools": [{"type": "a\r\nb_20250305", "name": "f"}]}, "tools[0].type"),
        ({"tools": [SEARCH], "tool_choice": {"type": "tool", "name": "web_search"}}, "web_search"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
        ({"container": "c"}, "container"),
    ],
)  # fmt: skip
def test_an_error_names_the_wrong_field(served: Server, fields: dict[str, Any], named: str) -> None:
    answer = ask(served, **fields)
    error, body = error_of(answer), answer.json()
    assert (body["type"], error["type"]) == ("error", "invalid_request_error")
    assert named in error["message"]
    assert body["request_id"] == answer.headers["request-id"]


def test_every_error_has_anthropics_shape(served: Server) -> None:
    client, path = served.client, "/v1/messages"
    for status, answer, kind in (
        (404, client.post(f"{path}/nothing", json={}), "not_found_error"),
        (404, ask(served, model="nobody"), "not_found_error"),
        (413, ask(served, said("x" * 30_000)), "request_too_large"),
        (501, client.post(f"{path}/batches", json={}), "api_error"),
        (405, client.get(path), "invalid_request_error"),
        (415, client.post(path, content="x", headers=PLAIN), "invalid_request_error"),
        (400, client.post(path, content=b"{"), "invalid_request_error"),
    ):
        assert error_of(answer, status)["type"] == kind
    too_long = error_of(ask(served, said("x" * 3000)))
    assert too_long["message"].startswith("prompt is too long: ")


def test_keys_and_limits_of_the_server_are_answered_in_this_shape(
    start_server: StartServer,
) -> None:
    server = start_server("--api-key=sesame", "--max-generation-tokens=5", "--default-max-tokens=5")
    assert error_of(ask(server), 401)["type"] == "authentication_error"
    server.client.headers.update({"x-api-key": "sesame", "anthropic-version": "2023-06-01"})
    busy = ask(server)  # there is no engine
    assert error_of(busy, 503)["type"] == "overloaded_error"
    assert int(busy.headers["retry-after"]) >= 1
    server.join("hello" * 20)
    stopped = ask(server, max_tokens=9999).json()
    assert stopped["stop_reason"] == "max_tokens"  # it is not the end of the context


def test_an_error_in_a_stream_is_an_event(server: Server) -> None:
    engine = server.join("hello world", hold_tokens_after=2)
    body: dict[str, Any] = {"max_tokens": 9, "messages": HI}
    text = server.stream_until("text_delta", engine.kill, "/v1/messages", **body)
    last = named_events(text)[-1]
    assert (last["type"], last["error"]["type"]) == ("error", "overloaded_error")


def test_counted_tokens_are_those_of_an_answered_request(served: Server) -> None:
    path = "/v1/messages/count_tokens"
    count = served.post(path, messages=HI, system="be kind", tools=[]).json()
    assert not served.engine.got(Submit)
    assert ask(served, system="be kind").json()["usage"]["input_tokens"] == count["input_tokens"]
    wrong = served.post(path, messages=[])
    assert (wrong.status_code, wrong.json()["type"]) == (400, "error")


DELTAS = [
    OutputDelta((ReplyDelta(reasoning="I "),)),
    OutputDelta((ReplyDelta(reasoning="think."),)),
    OutputDelta((ReplyDelta(calls=(CallDelta(0, "", "call_a", "f"), CallDelta(0, '{"x"'))),)),
    OutputDelta((ReplyDelta(calls=(CallDelta(0, ": 1}"), CallDelta(1, "{}", "call_b", "g"))),)),
]


def finished(*deltas: OutputDelta, show_thinking: bool = True) -> list[Any]:
    builder = ContentBlockBuilder(show_thinking=show_thinking)
    builder.feed(OutputDelta.join(deltas))
    builder.finish()
    return [msgspec.to_builtins(block) for block in builder.finished]


def test_thinking_and_calls_are_blocks_of_their_own() -> None:
    builder = ContentBlockBuilder(show_thinking=True)
    stream = [event for delta in DELTAS for event in builder.feed(delta)] + builder.finish()
    blocks = [msgspec.to_builtins(block) for block in builder.finished]
    assert finished(*DELTAS) == blocks
    omitted = finished(*DELTAS, show_thinking=False)[0]
    assert omitted["thinking"] == "" and omitted["signature"]
    thinking, first, second = blocks
    assert thinking["thinking"] == "I think."
    assert (first["id"], first["input"]) == ("toolu_a", {"x": 1})
    assert (second["id"], second["input"]) == ("toolu_b", {})
    sent = [msgspec.to_builtins(event) for event in stream]
    assert [event.get("delta", event)["type"] for event in sent] == [
        *("content_block_start", "ping", "thinking_delta", "thinking_delta"),
        *("signature_delta", "content_block_stop"),
        *("content_block_start", "input_json_delta", "input_json_delta", "content_block_stop"),
        *("content_block_start", "input_json_delta", "content_block_stop"),
    ]


def test_a_note_stands_in_a_tool_result_and_nothing_deeper_is_searched() -> None:
    unknown = ContentBlockParam(type="video")
    inner = ContentBlockParam(type="tool_result", content=[unknown])  # is refused later
    outer = ContentBlockParam(type="tool_result", content=[inner, unknown])
    message = MessageParam(role="user", content=[outer])
    found: Any = with_notes(CountTokensRequest(messages=[message])).messages[0].content
    first, second = found[0].content
    assert (first, second.type) == (inner, "text")


def test_blank_text_alone_is_an_answer_and_a_call_cut_in_its_arguments_has_no_input() -> None:
    blank = OutputDelta((ReplyDelta(text="\n"),))
    assert [block["text"] for block in finished(blank)] == ["\n"]
    call = CallDelta(0, '{"x": ', "call_a", "f")
    assert finished(OutputDelta((ReplyDelta(calls=(call,)),)))[0]["input"] == {}
