"""OpenAI's Responses API over a scripted engine."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import httpx
import msgspec
import pytest

from router.api.truncation import truncate_to_fit
from router.errors import ContextLengthExceeded, NotFound
from router.generation.choice import OutputDelta
from router.responses.output import OutputItemBuilder
from router.responses.store import ItemReferences, ResponseStore, StoredResponse
from router.schemas.conversation import ChatMessage
from router.schemas.requests import ChatRequest
from router.tokens.image_prompts import Prompt
from router.tokens.reply_parser import CallDelta, ReplyDelta
from shared.wire import Submit
from tests.router.conftest import Server, StartServer, bearer, error_of, named_events, ok
from tests.router.scripted_engine import ScriptedEngine

IMAGE = {"type": "input_image", "image_url": "x"}
DEEP: dict[str, Any] = {"type": "web_search"}
for _ in range(60):
    DEEP = {"type": "web_search", "tools": [DEEP]}


def ask(server: Server, given: Any = "hi", **fields: Any) -> httpx.Response:
    return server.post("/v1/responses", **{"input": given, **fields})


def events(text: str) -> list[Any]:
    """Return the events of a stream, numbered from 0. Comments are skipped."""
    found = named_events(re.sub(r"^:.*\n\n", "", text, flags=re.MULTILINE))
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def streamed(server: Server, given: Any = "hi", **fields: Any) -> list[Any]:
    return events(ok(ask(server, given, stream=True, **fields)).text)


def test_an_answer_is_a_response(served: Server) -> None:
    served.engine.behaviour.cached_tokens = 5
    body = ask(served, instructions="be kind", metadata={"a": "b"}, temperature=0.5).json()
    (submit,) = served.engine.got(Submit)
    assert body["id"].startswith("resp_")
    assert (body["object"], body["status"], body["model"]) == ("response", "completed", "tiny")
    (message,) = body["output"]
    assert message.pop("id").startswith("msg_")
    part = {"type": "output_text", "text": "hello world", "annotations": [], "logprobs": []}
    written = {"type": "message", "role": "assistant", "status": "completed"}
    assert message == {**written, "content": [part]}
    assert body["usage"] == {
        "input_tokens": len(submit.token_ids),
        "input_tokens_details": {"cached_tokens": 5, "cache_write_tokens": 0},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": len(submit.token_ids) + 5,
    }
    assert (body["error"], body["incomplete_details"]) == (None, None)
    assert (body["instructions"], body["metadata"]) == ("be kind", {"a": "b"})
    assert (body["temperature"], body["store"], body["tool_choice"]) == (0.5, True, "auto")
    assert body["text"]["format"] == {"type": "text"}


def test_a_stream_has_openais_event_order(served: Server) -> None:
    created, running, added, part, *deltas, text, part_done, done, completed = streamed(served)
    others = (created, running, added, part, text, part_done, done, completed)
    assert [event["type"].removeprefix("response.") for event in others] == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *("output_text.done", "content_part.done", "output_item.done", "completed"),
    ]
    assert created["response"]["status"] == "in_progress"
    assert (added["item"]["status"], added["item"]["content"]) == ("in_progress", [])
    part_ids = {"item_id": added["item"]["id"], "output_index": 0, "content_index": 0}
    assert all(part_ids.items() <= event.items() for event in (part, *deltas))
    assert {event["type"] for event in deltas} == {"response.output_text.delta"}
    assert "".join(event["delta"] for event in deltas) == text["text"] == "hello world"
    assert part_done["part"] == done["item"]["content"][0]
    response = completed["response"]
    assert (response["output"], response["status"]) == ([done["item"]], "completed")
    assert response["id"] == created["response"]["id"]
    assert served.client.get("/v1/responses/" + response["id"]).json() == response


def test_an_answer_cut_at_its_limit_is_incomplete_and_at_a_stop_string_complete(
    served: Server,
) -> None:
    body = ask(served, max_output_tokens=2).json()
    assert body["status"] == "incomplete"
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    assert body["output"][-1]["status"] == "incomplete"
    last = streamed(served, max_output_tokens=2)[-1]
    assert (last["type"], last["response"]["status"]) == ("response.incomplete", "incomplete")
    for stop in ("wor", ["x", "wor"]):  # as with vLLM and SGLang; OpenAI has none
        body = ok(ask(served, stop=stop)).json()
        assert (body["status"], body["output"][0]["content"][0]["text"]) == ("completed", "hello ")


def test_items_become_the_messages_of_a_conversation(served: Server) -> None:
    said = [{"type": "output_text", "text": "two"}]
    items = [
        {"role": "developer", "content": "be brief"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "one"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hmm"}]},
        {"type": "message", "role": "assistant", "content": said},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c", "output": "three"},
        {"role": "system", "content": "four"},
        {"role": "user", "content": "five"},
    ]
    ok(ask(served, items, instructions="be kind"))
    assert served.engine.last_prompt == (
        "<|system|>be kind\n\nbe brief\n<|user|>one\n<|assistant|>two"
        '{"name": "f", "arguments": {"a": 1}}\n'
        "<|tool|>three\n<|system|>four\n<|user|>five\n<|assistant|>"
    )


def test_a_response_continues_an_earlier_one(served: Server) -> None:
    first = ask(served, "one", instructions="be kind").json()
    second = ask(served, "two", previous_response_id=first["id"]).json()
    assert second["previous_response_id"] == first["id"]
    expected = "<|user|>one\n<|assistant|>hello world\n<|user|>two\n<|assistant|>"
    assert served.engine.last_prompt == expected
    served.client.delete("/v1/responses/" + first["id"])
    ok(ask(served, "three", previous_response_id=second["id"]))
    assert served.engine.last_prompt.startswith(expected)


def test_input_items_are_listed_in_pages(served: Server) -> None:
    first = ask(served, "one").json()
    second = ask(served, "two", previous_response_id=first["id"]).json()

    def page(**params: str) -> Any:
        path = f"/v1/responses/{second['id']}/input_items"
        return served.client.get(path, params=params)

    items = page(order="asc").json()
    texts = [item["content"][0]["text"] for item in items["data"]]
    assert texts == ["one", "hello world", "two"]
    assert (items["has_more"], items["first_id"]) == (False, items["data"][0]["id"])
    newest = page(limit="1", after=items["last_id"]).json()
    assert newest["has_more"]
    assert newest["data"][0]["id"] == items["data"][1]["id"]
    for limit in ("0", "101", "0001000000", "9" * 5000, "\u0663", "x"):
        assert error_of(page(limit=limit))["param"] == "limit"


def test_an_item_can_be_referenced(server: Server, engine: ScriptedEngine) -> None:
    first = ask(server, "one").json()
    reference = {"type": "item_reference", "id": first["output"][0]["id"]}
    ok(ask(server, [reference, {"role": "user", "content": "two"}]))
    assert engine.last_prompt == "<|assistant|>hello world\n<|user|>two\n<|assistant|>"
    assert error_of(ask(server, [{"id": "msg_nobody"}]), 404)["param"] == "input[0].id"


@pytest.mark.parametrize("stored", [False, True])
def test_a_response_that_is_not_stored_or_was_deleted_is_not_found(
    served: Server, stored: bool
) -> None:
    body = ask(served, store=stored).json()
    assert body["store"] is stored
    client, url = served.client, "/v1/responses/" + body["id"]
    if stored:
        assert client.get(url).json() == body
        assert client.post(url + "/cancel").status_code == 400
        deleted = {"id": body["id"], "object": "response", "deleted": True}
        assert client.delete(url).json() == deleted
    missing = (client.get(url), client.delete(url), client.post(url + "/cancel"))
    last = ask(served, previous_response_id=body["id"])
    for answer in (*missing, client.get(url + "/input_items"), last):
        assert "make room" in error_of(answer, 404)["message"]
    assert error_of(last, 404)["param"] == "previous_response_id"


def test_an_api_key_cannot_see_responses_of_another(start_server: StartServer) -> None:
    server = start_server("--api-key=one", "--api-key=two")
    client = server.client
    client.headers.update(bearer("one"))
    server.join("hello")
    body = ask(server).json()
    url = "/v1/responses/" + body["id"]
    reference = [{"type": "item_reference", "id": body["output"][0]["id"]}]
    ok(client.get(url))
    client.headers.update(bearer("two"))
    continued = ask(server, previous_response_id=body["id"])
    for hidden in (client.get(url), client.delete(url), continued, ask(server, reference)):
        assert hidden.status_code == 404


def test_log_probabilities_come_with_their_text(served: Server) -> None:
    fields: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    whole = ask(served, **fields).json()["output"][0]["content"][0]["logprobs"]
    assert "".join(token["token"] for token in whole) == "hello world"
    assert all(len(token["top_logprobs"]) == 2 for token in whole)
    stream = streamed(served, **fields)
    deltas = [event for event in stream if event["type"] == "response.output_text.delta"]
    assert [token for event in deltas for token in event["logprobs"]] == whole
    assert stream[-1]["response"]["output"][0]["content"][0]["logprobs"] == whole


def test_a_long_conversation_is_truncated_at_its_beginning_if_allowed(served: Server) -> None:
    items = [{"role": "user", "content": f"{number} " + "x" * 90} for number in range(9)]
    assert error_of(ask(served, items, max_output_tokens=20))["param"] == "input"
    ok(ask(served, items, truncation="auto", max_output_tokens=20, instructions="be kind"))
    assert served.engine.last_prompt.startswith("<|system|>be kind\n<|user|>5 xxx")
    assert len(served.engine.got(Submit)[-1].token_ids) <= 512 - 20


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [IMAGE]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "x" * 2000}, "input"),
        ({"max_tokens": 5, "max_output_tokens": 6}, "max_tokens"),
        ({"tools": [{"type": "web_search", "parameters": DEEP}]}, "tools"),
        ({"tools": [DEEP]}, "tools"),
        ({"tool_choice": DEEP}, "tool_choice"),
        ({"text": {"format": {"type": "text", "schema": DEEP}}}, "text"),
    ],
)
def test_an_error_names_the_wrong_field(served: Server, fields: dict[str, Any], param: str) -> None:
    error = error_of(ask(served, **fields))
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert param == "input" or param.split("[")[0].split(".")[0] in error["message"]


@pytest.mark.parametrize("instructions", ["short", "long " * 3_500])
def test_an_error_in_a_stream_is_two_events(server: Server, instructions: str) -> None:
    engine = server.join("hello world", hold_tokens_after=2, context_length=100_000)
    body = {"input": "hi", "instructions": instructions}
    text = server.stream_until("output_text.delta", engine.kill, "/v1/responses", **body)
    *_, error, failed = events(text)
    assert (error["type"], error["code"]) == ("error", "engine_lost")
    assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
    assert failed["response"]["error"]["code"] == "server_error"
    assert failed["response"]["instructions"] == instructions
    assert server.client.get("/v1/responses/" + failed["response"]["id"]).status_code == 404


DELTAS = [
    OutputDelta((ReplyDelta(reasoning="I "),)),
    OutputDelta((ReplyDelta(reasoning="think."),)),
    OutputDelta((ReplyDelta(text="So:"),)),
    OutputDelta((ReplyDelta(calls=(CallDelta(0, "", "call_a", "f"), CallDelta(0, '{"x"'))),)),
    OutputDelta((ReplyDelta(calls=(CallDelta(0, ": 1}"), CallDelta(1, "{}", "call_b", "g"))),)),
]


@pytest.mark.parametrize("summarized", [False, True])
def test_reasoning_text_and_calls_are_items_of_their_own(summarized: bool) -> None:
    stream = OutputItemBuilder(summarized=summarized)
    sent = [event for delta in DELTAS for event in stream.feed(delta)] + stream.finish()
    reasoning, message, first, second = (msgspec.to_builtins(item) for item in stream.finished)
    texts = reasoning["summary" if summarized else "content"]
    assert [part["text"] for part in texts] == ["I think."]
    assert message["content"][0]["text"] == "So:"
    assert (first["call_id"], first["arguments"]) == ("call_a", '{"x": 1}')
    assert (second["call_id"], second["arguments"]) == ("call_b", "{}")
    tags = [str(event.__struct_config__.tag).removeprefix("response.") for event in sent]
    part = "reasoning_summary_part." if summarized else "content_part."
    text = "reasoning_summary_text." if summarized else "reasoning_text."
    arguments = "function_call_arguments."
    assert tags == [
        *("output_item.added", part + "added", text + "delta", text + "delta"),
        *(text + "done", part + "done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", arguments + "delta", arguments + "delta"),
        *(arguments + "done", "output_item.done"),
        *("output_item.added", arguments + "delta", arguments + "done", "output_item.done"),
    ]


def turn(number: int, before: StoredResponse | None = None, key: str = "k") -> StoredResponse:
    items = json.dumps([{"type": "message", "id": f"in_{number}", "content": "x" * 500}])
    answer = json.dumps({"output": [{"type": "message", "id": f"out_{number}"}]})
    return StoredResponse(key, before, items.encode(), answer.encode())


def test_the_store_drops_the_least_recently_used_response() -> None:
    store = ResponseStore(max_bytes=10**6, max_responses=2)
    store.put("a", turn(1))
    store.put("b", turn(2))
    store.find("k", "a")
    store.put("c", turn(3))
    with pytest.raises(NotFound):
        store.find("k", "b")
    assert store.find_turn("k", "in_2") is None
    assert store.find("k", "a").item_ids == ["in_1", "out_1"]


@pytest.mark.parametrize("limits", [{"max_responses": 4}, {"max_bytes": 4 * turn(0).size_bytes}])
def test_a_key_drops_no_response_of_a_key_that_has_fewer(limits: dict[str, Any]) -> None:
    store = ResponseStore(**{"max_bytes": 10**6, **limits})
    store.put("a", turn(0, key="alice"))
    for number in range(1, 7):
        store.put(str(number), turn(number, key="bob"))
    assert len(store) == 4 and store.find("alice", "a")
    store.put("b", turn(7, key="alice"))  # bob has more, and loses his oldest
    assert len(store) == 4 and store.find("alice", "a") and store.find("bob", "6")
    with pytest.raises(NotFound):
        store.find("bob", "4")


@pytest.mark.parametrize("deleted_first", [False, True])
def test_a_turn_that_later_turns_build_on_stays_and_counts(deleted_first: bool) -> None:
    one, store = turn(1), ResponseStore(max_bytes=10**6)
    store.put("a", one)
    if deleted_first:
        store.delete("k", "a")
    store.put("b", turn(2, one))
    if not deleted_first:
        store.delete("k", "a")
    assert store.size_bytes == one.size_bytes + turn(2).size_bytes
    assert len(store.find("k", "b").conversation(10**6, whole=True)) == 4
    assert store.find_turn("k", "in_1") is one
    store.delete("k", "b")
    assert store.size_bytes == 0
    assert store.find_turn("k", "in_1") is None


def test_the_store_never_exceeds_its_limit() -> None:
    store = ResponseStore(max_bytes=5 * turn(0).size_bytes)
    last: StoredResponse | None = None
    for number in range(50):
        last = turn(number, last if number % 4 else None)
        store.put(str(number), last)
        assert store.size_bytes <= 5 * turn(0).size_bytes + 100
    assert 0 < len(store) <= 5
    nothing = ResponseStore(max_bytes=0)
    nothing.put("a", turn(1))
    assert (len(nothing), nothing.size_bytes) == (0, 0)


def conversation(length: int) -> StoredResponse:
    """Return the last of some turns."""
    last = turn(0)
    for number in range(1, length):
        last = turn(number, last)
    return last


def test_a_stored_conversation_is_read_up_to_a_limit() -> None:
    last = conversation(10)
    limit = 3 * last.size_bytes + 100
    with pytest.raises(ContextLengthExceeded) as refused:
        last.conversation(limit, whole=True)
    assert refused.value.param == "previous_response_id"
    ids = [item.id for item in last.conversation(limit, whole=False)]
    assert ids == ["in_7", "out_7", "in_8", "out_8", "in_9", "out_9"]
    assert len(last.conversation(10, whole=False)) == 2  # the last turn at least


def test_a_page_decodes_only_its_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    last = conversation(10)
    read: list[StoredResponse] = []
    new_items = StoredResponse.new_items

    def record(stored: StoredResponse) -> list[msgspec.Raw]:
        read.append(stored)
        return new_items(stored)

    monkeypatch.setattr(StoredResponse, "new_items", record)
    items, more = last.input_page("out_8", 3, newest_first=True)
    assert ([item["id"] for item in items], more) == (["in_8", "out_7", "in_7"], True)
    items, more = last.input_page("in_8", 3, newest_first=False)
    assert ([item["id"] for item in items], more) == (["out_8", "in_9"], False)
    assert len(read) == 4


def test_an_item_is_not_referred_to_without_end() -> None:
    store = ResponseStore(max_bytes=10**6)
    store.put("a", turn(1))
    references = ItemReferences(store, "k", 2000)
    assert references.find("nothing") is None
    for _ in range(3):
        item = references.find("in_1")
        assert item is not None and item.id == "in_1"
    with pytest.raises(ContextLengthExceeded):
        references.find("in_1")


@pytest.mark.parametrize("limit", [25, 40, 77, 250, 1000])
def test_as_few_turns_as_possible_are_dropped_in_few_tries(limit: int) -> None:
    rng = random.Random(limit)
    lengths = [rng.randrange(1, 20) for _ in range(200)]
    messages = [ChatMessage("user", "word " * length) for length in lengths]
    request = ChatRequest(messages=messages)
    tries: list[int] = []

    def render(shorter: ChatRequest) -> list[Prompt]:
        tries.append(len(shorter.messages))
        length = sum(len(str(message.content)) // 5 for message in shorter.messages)
        return [Prompt.of_text([0] * length)]

    (found,) = truncate_to_fit(render(request), request, limit, render)
    best = max(sum(lengths[start:]) for start in range(200) if sum(lengths[start:]) <= limit)
    assert len(found.token_ids) == best
    assert len(tries) <= 7
