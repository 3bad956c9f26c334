"""Fields that constrain an answer by a grammar, from the body to the engine and back."""

from __future__ import annotations

import json
import time
from typing import Any

import msgspec
import pytest

from router.errors import InvalidRequest
from router.schemas.structured import StructuredOutputFields, choice_grammar, json_schema_grammar
from shared.wire import MAX_GRAMMAR_BYTES, Accepted, Grammar, LiveRequest, Refused, Submit, encode
from tests.router.conftest import Server, begin, error_of, eventually, ok
from tests.router.scripted_engine import make_heartbeat, make_refusal, names_of

SCHEMA = {"type": "object", "properties": {"z": {"type": "integer"}, "a": {"type": "null"}}}
TEXT = json.dumps(SCHEMA, separators=(",", ":"))
OBJECT = '{"type":"object"}'
IN_SCHEMA = "response_format.json_schema.schema"
NAMED_SCHEMA = {"name": "x", "strict": True, "schema": SCHEMA}
CHOICES = 'start: "a" | "é\\"\\n"'


def format_of(kind: str, **fields: Any) -> dict[str, Any]:
    return {"response_format": {"type": kind, **fields}}


def outputs(**fields: Any) -> dict[str, Any]:
    return {"structured_outputs": fields}


@pytest.mark.parametrize(
    ("fields", "kind", "source", "param"),
    [
        (format_of("json_object"), "json_schema", OBJECT, "response_format"),
        (format_of("json_object", schema={}), "json_schema", OBJECT, "response_format"),
        (format_of("json_object", schema=SCHEMA), "json_schema", TEXT, "response_format.schema"),
        (format_of("json_schema", json_schema=NAMED_SCHEMA), "json_schema", TEXT, IN_SCHEMA),
        (outputs(json=SCHEMA), "json_schema", TEXT, "structured_outputs.json"),
        (outputs(json_object=True), "json_schema", OBJECT, "structured_outputs.json_object"),
        (outputs(regex="[a-z]+"), "regex", "[a-z]+", "structured_outputs.regex"),
        (outputs(choice=["a", 'é"\n']), "lark", CHOICES, "structured_outputs.choice"),
        (outputs(grammar='start: "a"'), "lark", 'start: "a"', "structured_outputs.grammar"),
        ({"guided_json": SCHEMA}, "json_schema", TEXT, "guided_json"),
        ({"guided_json": TEXT}, "json_schema", TEXT, "guided_json"),
        ({"guided_regex": "a|b"}, "regex", "a|b", "guided_regex"),
        ({"guided_choice": ["yes", "no"]}, "lark", 'start: "yes" | "no"', "guided_choice"),
        ({"guided_grammar": 'start: "b"'}, "lark", 'start: "b"', "guided_grammar"),
    ],
)
def test_each_field_alone_is_sent_to_the_engine_as_its_grammar(
    served: Server, fields: dict[str, Any], kind: str, source: str, param: str
) -> None:
    ok(served.chat(**fields))
    ok(served.complete(**fields, n=2))
    grammar = Grammar(kind=kind, source=source, param=param)  # type: ignore[arg-type]
    ok(served.chat(response_format={"type": "text"}, structured_outputs=None, guided_json=None))
    assert [submit.grammar for submit in served.engine.got(Submit)] == [*[grammar] * 3, None]


@pytest.mark.parametrize(
    "fields",
    [
        outputs(grammar='start: "a"') | {"guided_grammar": 'start: "a"'},
        format_of("json_schema", json_schema=NAMED_SCHEMA) | {"guided_json": json.dumps(SCHEMA)},
        outputs(choice=["a", "b"]) | {"guided_choice": ["a", "b"]},
    ],
)
def test_one_constraint_may_have_several_names(served: Server, fields: dict[str, Any]) -> None:
    ok(served.chat(**fields))
    assert served.engine.got(Submit)[-1].grammar is not None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (format_of("xml"), "response_format.type"),
        (format_of("json_schema"), "response_format.json_schema"),
        (format_of("json_schema", json_schema={"name": "x"}), IN_SCHEMA),
        (format_of("json_schema", json_schema={"schema": 5}), IN_SCHEMA),
        ({"response_format": "json"}, "response_format"),
        (outputs(), "structured_outputs"),
        (outputs(json_object=False), "structured_outputs"),
        (outputs(regex="a", choice=["b"]), "structured_outputs.choice"),
        (outputs(structural_tag="{}"), "structured_outputs.structural_tag"),
        (outputs(choice=[]), "structured_outputs.choice"),
        ({"guided_choice": ["a", 1]}, "guided_choice[1]"),
        ({"guided_json": '{"type":'}, "guided_json"),
        ({"guided_json": []}, "guided_json"),
        ({"guided_regex": 5}, "guided_regex"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
    ],
)
def test_a_bad_grammar_field_is_named(server: Server, fields: dict[str, Any], param: str) -> None:
    for answer in (server.chat(**fields), server.complete(**fields, stream=True)):
        assert error_of(answer)["param"] == param, answer.text


def test_more_than_one_grammar_names_them_all() -> None:
    bound = msgspec.convert(
        {"guided_regex": "a", "guided_choice": ["b"], "response_format": {"type": "json_object"}},
        StructuredOutputFields,
    )
    with pytest.raises(InvalidRequest) as refused:
        _ = bound.grammar
    for name in ("response_format", "guided_regex", "guided_choice"):
        assert f"'{name}'" in refused.value.message


def test_the_size_of_a_grammar_is_limited() -> None:
    fits = "a" * (MAX_GRAMMAR_BYTES - len('start: ""'))
    assert choice_grammar([fits], "x").source
    with pytest.raises(InvalidRequest, match="limit"):
        choice_grammar([fits + "a"], "x")
    with pytest.raises(InvalidRequest, match="limit"):
        json_schema_grammar({"const": "é" * (MAX_GRAMMAR_BYTES // 2)}, "x")
    with pytest.raises(InvalidRequest, match="not valid JSON"):
        json_schema_grammar("[" * 100_000, "x")


def test_a_grammar_that_the_engine_refuses_is_a_400_before_any_header(served: Server) -> None:
    def refuse(submit: Submit) -> Refused:
        assert submit.grammar is not None
        param = submit.grammar.param
        return make_refusal(submit, reason="invalid", message="unclosed group", param=param)

    served.engine.behaviour.refuse = refuse
    error = error_of(served.chat(guided_regex="(", stream=True))
    assert (error["message"], error["param"]) == ("unclosed group", "guided_regex")


def test_a_sequence_whose_grammar_compiles_is_neither_accepted_nor_lost(server: Server) -> None:
    """Beats mention its request for longer than the router waits for an unknown one."""
    engine = server.join("hello world", accept=False, hold_tokens_after=0)
    engine.behaviour.heartbeats = False

    def ask() -> int:
        body = {"prompt": "x", "guided_regex": "a", "stream": True}
        with server.client.stream("POST", "/v1/completions", json=body) as answer:
            return answer.status_code

    status = begin(ask)
    eventually(lambda: len(engine.got(Submit)) == 1)
    (submit,) = engine.got(Submit)
    live = [LiveRequest(**names_of(submit), generated=0, accepted=False)]
    for number in range(1000, 1040):
        engine.say(*encode(make_heartbeat(engine.name, engine.incarnation, number, live=live)))
        time.sleep(0.08)
    assert not status.done()
    engine.behaviour.heartbeats = True
    engine.behaviour.hold_tokens_after = None
    engine.say(*encode(Accepted(**names_of(submit))))
    assert status.result(60) == 200
