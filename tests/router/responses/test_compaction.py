"""Conversations that become a summary: by a trigger, by their own endpoint, and by a threshold."""

from __future__ import annotations

import base64
import itertools
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.responses.compaction import divided, extract, last_turn
from router.schemas.conversation import ChatMessage
from shared.wire import Submit
from tests.router.conftest import Server, StartServer, bearer, error_of, key_flag, ok
from tests.router.responses.test_responses import events
from tests.router.scripted_engine import ScriptedEngine

CHAT_MODEL = True
FLAGS = ("--reasoning-key=k",)
TRIGGER = {"type": "compaction_trigger"}
SPAWN = {"type": "function", "name": "spawn", "parameters": {"type": "object", "properties": {}}}
TASK = "Stop working on the task."


def user(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}


CALL = {"type": "function_call", "call_id": "c", "name": "spawn", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c", "output": "a long result"}
HISTORY: list[Any] = [user("first question"), CALL, RESULT]


def ask(server: Server, items: list[Any], **fields: Any) -> httpx.Response:
    return server.post("/v1/responses", input=items, tools=[SPAWN], **fields)


@pytest.fixture
def engine(server: Server) -> ScriptedEngine:
    return server.join("Goal: win.", context_length=8192)


def test_a_trigger_is_answered_by_one_sealed_item(server: Server, engine: ScriptedEngine) -> None:
    ok(ask(server, HISTORY))
    before = engine.last_prompt.removesuffix("<|im_start|>assistant\n")
    answer = ok(ask(server, [*HISTORY, TRIGGER], stream=True, store=False))
    found = events(answer.text)
    assert [event["type"] for event in found] == [
        *("response.created", "response.in_progress"),
        *("response.output_item.added", "response.output_item.done", "response.completed"),
    ]
    _, _, added, done, last = found
    assert added["item"] == {**done["item"], "encrypted_content": ""}
    assert last["response"]["output"] == [done["item"]]
    assert done["item"]["type"] == "compaction" and "win" not in done["item"]["encrypted_content"]
    usage = last["response"]["usage"]
    assert usage["output_tokens"] > 0 and usage["input_tokens"] > usage["output_tokens"]
    assert engine.last_prompt.startswith(before), "the prefix stays cached"
    assert TASK in engine.last_prompt
    assert engine.got(Submit)[-1].max_tokens == 8192 // 8


def compacted(server: Server, **fields: Any) -> dict[str, Any]:
    item: dict[str, Any]
    (item,) = ok(ask(server, [*HISTORY, TRIGGER], **fields)).json()["output"]
    return item


def test_the_next_turn_begins_with_the_summary(server: Server, engine: ScriptedEngine) -> None:
    item = compacted(server)
    for kind in ("compaction", "context_compaction"):
        ok(ask(server, [*HISTORY, {**item, "type": kind}, user("second question")]))
        prompt = engine.last_prompt
        order = [prompt.index(each) for each in ("first question", "Goal: win.", "second question")]
        assert order == sorted(order)
        assert "a long result" not in prompt and "spawn" not in prompt.split("first question")[1]
    stored = ok(ask(server, [item, user("second question")])).json()["id"]
    ok(ask(server, [user("third question")], previous_response_id=stored))
    assert "Goal: win." in engine.last_prompt and "third question" in engine.last_prompt


def test_a_summary_belongs_to_its_key_and_model_and_outlives_a_restart(
    start_server: StartServer, tmp_path: Path
) -> None:
    flags = (key_flag(tmp_path, "aaaa name=alice", "bbbb name=bob"), "--reasoning-key=k")
    servers = [start_server(*flags) for _ in range(2)]
    for server in servers:
        server.client.headers = httpx.Headers(bearer("aaaa"))
        server.join("Goal: win.", context_length=8192)
        server.join_as("other", "Goal: win.", name="b", context_length=8192)
    first, second = servers
    item = compacted(first, model="tiny")
    ok(ask(second, [item, user("go on")], model="tiny"))
    changed = bytearray(base64.urlsafe_b64decode(item["encrypted_content"][5:]))
    changed[40] ^= 1
    broken = item["encrypted_content"][:5] + base64.urlsafe_b64encode(changed).decode()
    for fields, key in (
        ({"model": "other"}, "aaaa"),
        ({"model": "tiny"}, "bbbb"),
        ({"encrypted_content": broken}, "aaaa"),
        ({"encrypted_content": "from elsewhere"}, "aaaa"),
        ({"encrypted_content": None}, "aaaa"),
    ):
        second.client.headers = httpx.Headers(bearer(key))
        sent = {**item, **{name: value for name, value in fields.items() if name in item}}
        answer = ask(second, [user("x"), sent, user("go on")], model=fields.get("model", "tiny"))
        assert error_of(answer)["param"] == "input[1].encrypted_content"


def test_a_model_that_writes_nothing_leaves_an_extract(server: Server) -> None:
    engine = server.join("", context_length=8192)
    item = compacted(server)
    ok(ask(server, [item, user("go on")]))
    assert "first question" in engine.last_prompt and "a long result" in engine.last_prompt


@pytest.mark.parametrize("wrong", [[TRIGGER, user("x")], [user("x"), TRIGGER, TRIGGER]])
def test_a_trigger_must_come_last(server: Server, engine: ScriptedEngine, wrong: Any) -> None:
    assert error_of(ask(server, wrong))["param"] == "input"
    ok(ask(server, [TRIGGER]))


def test_a_conversation_longer_than_the_context_is_summarized_in_parts(server: Server) -> None:
    engine = server.join("Goal: win.", context_length=2048)
    asked = [user(f"question {number} " + "why " * 30) for number in range(60)]
    turns = [item for question in asked for item in (question, CALL, RESULT)]
    huge = {**RESULT, "output": "word " * 3000}
    for items in (turns, [*turns[:20], CALL, huge], [user("x " * 5000)]):
        engine.received.clear()
        (item,) = ok(ask(server, [*items, TRIGGER], instructions="Rules.")).json()["output"]
        submits = engine.got(Submit)
        assert len(submits) > 1
        assert all(len(submit.token_ids) + submit.max_tokens <= 2048 for submit in submits)
        assert "Rules." in engine.last_prompt and "Goal: win." in engine.last_prompt
        ok(ask(server, [item, user("go on")]))


def test_instructions_that_do_not_fit_are_too_long(server: Server) -> None:
    server.join("Goal: win.", context_length=2048)
    answer = ask(server, [*HISTORY, TRIGGER], instructions="word " * 2000)
    assert error_of(answer)["code"] == "context_length_exceeded"
    streamed = ask(server, [*HISTORY, TRIGGER], instructions="word " * 2000, stream=True)
    assert error_of(streamed)["code"] == "context_length_exceeded"


def test_an_endpoint_compacts_a_conversation(server: Server, engine: ScriptedEngine) -> None:
    answer = ok(server.post("/v1/responses/compact", input=HISTORY, instructions="Rules.")).json()
    assert answer["object"] == "response.compaction" and answer["usage"]["total_tokens"] > 0
    kept, item = answer["output"]
    assert (kept["role"], kept["content"][0]["text"]) == ("user", "first question")
    ok(ask(server, [*answer["output"], user("second question")]))
    assert "Goal: win." in engine.last_prompt and "a long result" not in engine.last_prompt
    refused = server.post("/v1/responses/compact", input=HISTORY, stream=True)
    assert error_of(refused)["param"] == "stream" and item["type"] == "compaction"


def test_a_capsule_is_of_the_model_that_answers_whatever_its_name(
    start_server: StartServer, tmp_path: Path
) -> None:
    server = start_server(key_flag(tmp_path, "aaaa name=alice models=other"), "--reasoning-key=k")
    server.client.headers = httpx.Headers(bearer("aaaa"))
    server.join("Goal: lose.", context_length=8192)
    engine = server.join_as("other", "Goal: win.", context_length=8192)
    item = compacted(server)
    for name in ("other", "other:latest"):
        ok(ask(server, [item, user("second question")], model=name))
        assert "Goal: win." in engine.last_prompt


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_over_a_threshold_is_compacted_before_its_answer(
    server: Server, engine: ScriptedEngine, stream: bool
) -> None:
    managed = [{"type": "compaction", "compact_threshold": 400}]
    fields: dict[str, Any] = {"context_management": managed, "stream": stream}
    ok(ask(server, HISTORY, **fields))
    assert len(engine.got(Submit)) == 1, "it is short"
    long = [user("question"), CALL, {**RESULT, "output": "word " * 300}, user("and now?")]
    answer = ok(ask(server, long, **fields))
    assert len(engine.got(Submit)) == 3
    prompt = engine.last_prompt
    assert "word" not in prompt and "Goal: win." in prompt and "and now?" in prompt
    if stream:
        found = events(answer.text)
        assert [event["sequence_number"] for event in found] == list(range(len(found)))
        output = found[-1]["response"]["output"]
    else:
        output = answer.json()["output"]
    assert [item["type"] for item in output] == ["compaction", "message"]
    ok(ask(server, [*long, *output, user("next")], **fields))
    assert len(engine.got(Submit)) == 4


def test_results_stay_with_their_calls_in_every_division() -> None:
    roles = ("user", "assistant", "tool", "tool", "user", "assistant", "tool")
    messages = [ChatMessage(role, "x" * 100) for role in roles]  # type: ignore[arg-type]
    for limit in range(150, 900, 50):
        rest, parts = messages, []
        while rest:
            part, rest = divided(rest, limit)
            parts.append(part)
        assert [each.role for each in itertools.chain(*parts)] == list(roles)
        if limit >= 400:
            assert all(part[0].role != "tool" for part in parts)
    assert last_turn(messages) == 5 and last_turn(messages[:5]) == 4
    assert extract([]) == "(empty)"
