"""Structured output through the whole server."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import jsonschema
import pytest

from bench.engine.schemas import Schema, Sizes, generate
from tests.e2e.server import CHECKED, Server, at_once, events_of, llama_server

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SLOW = {"type": "integer", "multipleOf": 9_999_991}  # takes minutes to compile

server = llama_server(**CHECKED)


def ask(server: Server, path: str = COMPLETIONS, **fields: Any) -> httpx.Response:
    about = {"messages": [{"role": "user", "content": "x"}]} if path == CHAT else {"prompt": "x"}
    return server.post(path, **{**about, "max_tokens": 900, "temperature": 1, **fields})


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    assert choice["finish_reason"] == "stop", answer.text
    text: str = choice["message"]["content"] if "message" in choice else choice["text"]
    return text


def test_answers_are_valid_against_their_schemas(server: Server) -> None:
    schemas = generate(20, seed=3, sizes=Sizes(depth=2, properties=3, items=2, characters=6))

    def valid(numbered: tuple[int, Schema]) -> None:
        number, schema = numbered
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        path = CHAT if number % 2 else COMPLETIONS
        text = text_of(ask(server, path, response_format=form, seed=number))
        jsonschema.validate(json.loads(text), schema)

    at_once(valid, list(enumerate(schemas)))


def test_json_object_answers_are_objects(server: Server) -> None:
    """The length is not limited: only some of these answers end in time."""
    fields: dict[str, Any] = {"response_format": {"type": "json_object"}, "max_tokens": 400}
    found = at_once(lambda seed: ask(server, seed=seed, **fields), range(8))
    answers = [answer.json()["choices"][0] for answer in found]
    ended = [choice["text"] for choice in answers if choice["finish_reason"] == "stop"]
    assert ended and all(isinstance(json.loads(text), dict) for text in ended)
    assert all(choice["text"].startswith("{") for choice in answers)


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_regex": "[a-c]{2,5}x"}, "[a-c]{2,5}x"),
        ({"structured_outputs": {"choice": ["yes", "no", 'é "\n']}}, 'yes|no|é "\n'),
        ({"guided_grammar": 'start: "(" n ")"\nn: /[0-9]{1,3}/ | start'}, r"\(+[0-9]{1,3}\)+"),
        ({"guided_regex": "a{30}", "max_tokens": 7}, None),
        ({"guided_regex": "ab+c", "stop": "bc"}, "ab*"),
        ({"guided_regex": "[a-z]{9}", "min_tokens": 30, "ignore_eos": True}, "[a-z]{9}"),
    ],
)
def test_answers_match_other_grammars(
    server: Server, fields: dict[str, Any], pattern: str | None
) -> None:
    for path in (CHAT, COMPLETIONS):
        answer = ask(server, path, **fields)
        if pattern is None:
            assert answer.json()["choices"][0]["finish_reason"] == "length"
        else:
            assert re.fullmatch(pattern, text_of(answer))


def test_grammars_work_with_several_choices_streams_and_log_probabilities(server: Server) -> None:
    pattern = "[a-z]{3}(-[0-9]{2}){2}"
    fields: dict[str, Any] = {"guided_regex": pattern, "seed": 11, "n": 3, "logprobs": 2}
    whole = ask(server, **fields).json()["choices"]
    texts = ["", "", ""]
    for event in events_of(ask(server, stream=True, **fields)):
        for choice in event.get("choices", ()):
            texts[choice["index"]] += choice["text"]
    assert texts == [choice["text"] for choice in whole]
    assert len(set(texts)) == 3
    for choice in whole:
        assert re.fullmatch(pattern, choice["text"])
        assert "".join(choice["logprobs"]["tokens"]) == choice["text"]


CUSTOM = {"type": "custom", "name": "take", "format": {"type": "grammar"}}


def take(server: Server, syntax: str, definition: str) -> httpx.Response:
    format = {"type": "grammar", "syntax": syntax, "definition": definition}
    fields: dict[str, Any] = {"input": "x", "tool_choice": "required", "temperature": 1, "seed": 5}
    return server.post("/v1/responses", tools=[{**CUSTOM, "format": format}], **fields)


def test_the_input_of_a_custom_tool_follows_its_grammar(server: Server) -> None:
    nested = 'start: "\\n" | "[" start "]" | /[\\n"a]{3}/ "!" start'
    for syntax, definition, pattern in (
        ("regex", r'[a-c"]{2,5}\\\n', r'[a-c"]{2,5}\\\n'),
        ("lark", nested, r'(\[|[\n"a]{3}!)*\n\]*'),
    ):
        answer = take(server, syntax, definition)
        assert answer.status_code == 200, answer.text
        call = answer.json()["output"][0]
        assert call["type"] == "custom_tool_call"
        assert re.fullmatch(pattern, call["input"]), call["input"]


def test_a_grammar_of_a_custom_tool_that_does_not_compile_is_a_400_with_the_place(
    server: Server,
) -> None:
    for definition, where in (
        ('start: a\na: "x" b', "2(4): unknown name"),
        ("start: <x>", "line 1"),
    ):
        error = take(server, "lark", definition).json()["error"]
        assert error["param"] == "tools[0].format.definition"
        assert where in error["message"], error


@pytest.mark.parametrize(
    ("fields", "param", "where"),
    [
        ({"guided_regex": "a("}, "guided_regex", "unclosed group"),
        ({"guided_grammar": 'start: "a" b\n'}, "guided_grammar", "1(8): unknown name"),
        ({"guided_json": {"properties": {"a": {"type": "int"}}}}, "guided_json", "/properties/a"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 5}}}},
            "response_format.json_schema.schema",
            "type",
        ),
        ({"guided_json": {"enum": ["x" * 300_000]}}, "guided_json", "limit"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_does_not_compile_is_a_400_with_the_location(
    server: Server, fields: dict[str, Any], param: str, where: str, stream: bool
) -> None:
    for path in (CHAT, COMPLETIONS):
        answer = ask(server, path, stream=stream, **fields)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["param"] == param
        assert where in error["message"]


def test_a_grammar_that_takes_minutes_is_a_400_and_delays_no_other_request(server: Server) -> None:
    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(ask, server, guided_json=SLOW) for _ in range(3)]
        server.wait_until(lambda: server.sequences_in_flight() == 3, 30, "all with the engine")
        assert re.fullmatch("[0-9]{4}", text_of(ask(server, guided_regex="[0-9]{4}")))
        assert ask(server, max_tokens=5).status_code == 200
        assert not any(each.done() for each in asked)
        answers = [each.result(90) for each in asked]
    assert [answer.status_code for answer in answers] == [400] * 3
    assert all("takes longer" in answer.json()["error"]["message"] for answer in answers)
