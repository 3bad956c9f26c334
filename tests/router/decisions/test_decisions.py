"""The endpoints for decisions, in the shapes of three clients, with a scripted engine."""

from __future__ import annotations

import math
import time
from typing import Any

import httpx
import pytest

from router.decisions.asking import PROMPTS_AT_ONCE
from router.decisions.errors import PATHS
from shared.wire import EngineStats, Submit, TextTask
from tests.router.conftest import (
    Server,
    StartServer,
    bearer,
    begin,
    error_of,
    eventually,
    key_flag,
    ok,
)
from tests.router.scripted_engine import ScriptedEngine

CHAT_MODEL = True
FLAGS = ("--restart-wait-s=1", "--max-request-bytes=3000000")
CONTEXT = 8192
TEAM = {"type": "choice", "instructions": "Who?", "criteria": {"billing": "money", "post": None}}
ANGRY = {"type": "noul", "instructions": "Angry?"}
URGENT = {"type": "score", "instructions": "Urgent?", "criteria": ["no", "today", "now"]}
PREDICATE = {"type": "predicate", "instructions": "Angry?"}


@pytest.fixture
def engine(server: Server) -> ScriptedEngine:
    return server.join("A", context_length=CONTEXT, max_sequences=64)


def ask(
    server: Server, questions: Any, state: Any = "Charged twice.", /, **fields: Any
) -> httpx.Response:
    path = fields.pop("path", "/v1/systemone")
    return server.post(path, **{"state": state, "questions": questions, **fields})


def ask_listed(server: Server, *questions: Any, **fields: Any) -> httpx.Response:
    fields = {"input": "Charged twice.", **fields}
    return server.post("/v1/decisions", questions=list(questions), **fields)


def prompts_of(engine: ScriptedEngine) -> list[str]:
    decode = engine.tokenizer.decode
    submits = engine.got(Submit)
    return [decode(each.token_ids, skip_special_tokens=False) for each in submits]


def logs(*probabilities: float) -> Any:
    return lambda submit: [math.log(p) for p in probabilities[: len(submit.logprob_token_ids)]]


def test_three_kinds_of_questions_have_typed_answers_in_order(
    server: Server, engine: ScriptedEngine
) -> None:
    engine.behaviour.label_logprobs = logs(0.1, 0.6, 0.3)
    answer = ok(ask(server, {"u": URGENT, "team": TEAM, "angry": ANGRY}))
    assert list(answer.json()) == ["model", "answers", "usage"]
    answers = answer.json()["answers"]
    assert list(answers) == ["u", "team", "angry"] and answer.json()["model"] == "tiny"
    scored = answers["u"]
    assert scored["legend"] == {"0": "no", "1": "today", "2": "now"}
    assert scored["probabilities"] == pytest.approx({"0": 0.1, "1": 0.6, "2": 0.3})
    assert scored["score"] == pytest.approx(1.2) and scored["confidence"] == pytest.approx(0.4)
    assert answers["team"]["choice"] == "post" and list(answers["team"]["probabilities"]) == [
        *("billing", "post")
    ]
    assert answers["team"]["confidence"] == pytest.approx((6 / 7 - 0.5) / 0.5)
    assert answers["team"]["label_mass"] == pytest.approx(0.7)
    assert set(answers["angry"]) == {"type", "noul", "label_mass"}
    assert answers["angry"]["noul"] == pytest.approx(1 / 7)
    assert answer.headers["x-typesafe-request-id"] == answer.headers["x-request-id"]


def test_prompts_share_their_beginning_and_count_it_once(
    server: Server, engine: ScriptedEngine
) -> None:
    usage = ok(ask(server, {"u": URGENT, "team": TEAM, "angry": ANGRY})).json()["usage"]
    submits, prompts = engine.got(Submit), prompts_of(engine)
    beginning = prompts[0].partition("Question")[0]
    assert beginning.endswith("<|im_start|>user\nCharged twice.\n\n")
    assert all(prompt.startswith(beginning) for prompt in prompts)
    first = submits[0].token_ids
    shared = next(n for n in range(len(first), 0, -1) if submits[1].token_ids[:n] == first[:n])
    # The prompts part after "Question: ", which is tokenized with the rest.
    beginning_length = shared - len("Question: ")
    endings = sum(len(each.token_ids) - beginning_length for each in submits)
    assert usage["input_tokens"] == beginning_length + endings and usage["output_tokens"] == 0
    assert prompts[0].endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert "Question: Urgent?\n0. no\n1. today\n2. now\nAnswer" in prompts[0]
    assert "Question: Who?\nA. billing: money\nB. post\nAnswer" in prompts[1]
    assert "Question: Angry?\nAnswer A or B (A means yes, B means no).<|im_end|>" in prompts[2]
    for submit, labels in zip(submits, ("012", "AB", "AB"), strict=True):
        ids = [engine.tokenizer.token_to_id(label) for label in labels]
        assert list(submit.logprob_token_ids) == ids
        assert (submit.max_tokens, submit.logprobs, submit.sampling.temperature) == (1, 0, 0)


def test_a_list_of_questions_about_an_input_is_answered_in_openais_form(
    server: Server, engine: ScriptedEngine
) -> None:
    engine.behaviour.label_logprobs = logs(0.2, 0.6)
    both = [{"value": "true", "description": "a word"}, {"value": True}]
    levels = [{"label": "bad"}, {"label": "good", "description": "fine"}]
    answer = ok(
        ask_listed(
            server,
            {"type": "choice", "name": "kind", "instructions": "Which?", "choices": both},
            PREDICATE,
            {"type": "score", "instructions": [{"type": "input_text", "text": "How?"}]}
            | {"levels": levels},
        )
    ).json()
    # Vercel's client sends null where there are no instructions.
    ok(ask_listed(server, {"type": "choice", "instructions": None, "choices": both}))
    assert "Question: What applies?" in prompts_of(engine)[3]
    choice, predicate, score = answer["answers"]
    assert choice == {
        "type": "choice",
        "name": "kind",
        "choice": True,
        "confidence": pytest.approx(0.5),
        "probabilities": [
            {"value": "true", "probability": pytest.approx(0.25)},
            {"value": True, "probability": pytest.approx(0.75)},
        ],
        "label_mass": pytest.approx(0.8),
    }
    assert predicate["name"] is None and predicate["probability"] == pytest.approx(0.25)
    assert [each["label"] for each in score["probabilities"]] == ["bad", "good"]
    assert [each["value"] for each in score["probabilities"]] == [0, 1]
    assert set(answer["usage"]) == {
        *("input_tokens", "input_tokens_details", "output_tokens"),
        *("output_tokens_details", "total_tokens"),
    }
    assert 'A. "true": a word\nB. true\n' in prompts_of(engine)[0]
    assert "1. good: fine\n" in prompts_of(engine)[2]


def test_items_of_an_input_are_turns_before_the_question(
    server: Server, engine: ScriptedEngine
) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "found"}
    data = {"type": "input_json", "data": {"b": 1, "a": [2]}}
    items = [{"role": "user", "content": [data]}, call, output]
    ok(ask_listed(server, PREDICATE, input=items))
    (prompt,) = prompts_of(engine)
    assert '<|im_start|>user\n{"b":1,"a":[2]}<|im_end|>' in prompt and '"look"' in prompt
    assert "found<|im_end|>\n<|im_start|>user\nQuestion: Angry?" in prompt
    error = error_of(ask_listed(server, PREDICATE, input=[output, call]))
    assert error["param"] == "input[0].call_id"


def test_mlx_vlms_types_are_answered_in_its_form(server: Server, engine: ScriptedEngine) -> None:
    engine.behaviour.label_logprobs = lambda submit: (
        [math.log(0.6), math.log(0.2)]
        if '"money"' in engine.tokenizer.decode(submit.token_ids)
        else [math.log(0.2), math.log(0.6), math.log(0.2)][: len(submit.logprob_token_ids)]
    )
    tags: dict[str, Any] = {
        "type": "multi_label",
        "instructions": "Tags?",
        "criteria": ["money", "mud"],
    }
    questions = {"tags": tags, "yes": {"type": "bool", "instructions": "No?"}, "team": TEAM}
    answers = ok(ask(server, questions, path="/v1/decisions")).json()["answers"]
    assert answers["tags"]["value"] == ["money"]
    assert answers["tags"]["probabilities"] == pytest.approx({"money": 0.75, "mud": 0.25})
    assert answers["yes"]["value"] is False and answers["yes"]["probability"] == 0.25
    team = answers["team"]
    assert team["value"] == team["choice"] and team["metadata"]["confidence"] == team["confidence"]
    tags["threshold"] = 0.2
    answers = ok(ask(server, {"tags": tags})).json()["answers"]
    assert answers["tags"]["value"] == ["money", "mud"]
    pure = ok(ask(server, {"team": TEAM, "u": URGENT})).json()["answers"]
    assert "value" not in pure["team"] and "metadata" not in pure["u"]


@pytest.mark.parametrize("path", PATHS)
def test_every_path_takes_every_form(server: Server, engine: ScriptedEngine, path: str) -> None:
    assert "a" in ok(ask(server, {"a": ANGRY}, path=path)).json()["answers"]
    listed = ok(server.post(path, input="x", questions=[PREDICATE])).json()["answers"]
    assert listed[0]["type"] == "predicate"
    assert error_of(server.post(path, questions={}), 422)["param"] == "questions"


def test_options_are_averaged_over_their_rotations(server: Server, engine: ScriptedEngine) -> None:
    """The script prefers the option that is listed first."""
    engine.behaviour.label_logprobs = logs(0.6, 0.2, 0.2)
    three = {"type": "choice", "instructions": "Which?", "criteria": ["x", "y", "z"]}
    once = ok(ask(server, {"q": three})).json()["answers"]["q"]
    assert once["probabilities"] == pytest.approx({"x": 0.6, "y": 0.2, "z": 0.2})
    thrice = ok(ask(server, {"q": three}, samples=8)).json()["answers"]["q"]
    assert thrice["probabilities"] == pytest.approx(dict.fromkeys("xyz", 1 / 3))
    assert len(engine.got(Submit)) == 1 + 3  # there are no more rotations
    engine.received.clear()
    # The labels of a level and of yes keep their meaning.
    urgent = ok(ask(server, {"u": URGENT, "a": ANGRY}, samples=3)).json()["answers"]
    assert urgent["u"]["probabilities"] == pytest.approx({"0": 1 / 3, "1": 1 / 3, "2": 1 / 3})
    assert urgent["a"]["noul"] == pytest.approx(0.75)
    prompts = prompts_of(engine)
    assert "1. today\n2. now\n0. no\n" in prompts[1]
    assert "Answer B or A (B means no, A means yes)." in prompts[4] and len(prompts) == 5


def test_more_options_than_labels_are_decided_in_rounds(
    server: Server, engine: ScriptedEngine
) -> None:
    names = [f"option{number:02}" for number in range(60)]

    def prefers_option_41(submit: Submit) -> list[float]:
        text = engine.tokenizer.decode(submit.token_ids)
        listed = [line[3:] for line in text.split("\n") if ". option" in line]
        assert len(listed) == len(submit.logprob_token_ids)
        weights = [8.0 if name == "option41" else 1.0 for name in listed]
        return [math.log(weight / sum(weights) / 2) for weight in weights]

    engine.behaviour.label_logprobs = prefers_option_41
    question = {"type": "choice", "instructions": "Which?", "criteria": names}
    answer = ok(ask(server, {"q": question})).json()["answers"]["q"]
    found = answer["probabilities"]
    assert list(found) == names and sum(found.values()) == pytest.approx(1)
    assert answer["choice"] == "option41"
    # Two groups of 30; in the final between their winners it gets 8 of 9.
    assert found["option41"] == pytest.approx(8 / 37 * 8 / 9)
    assert found["option00"] == pytest.approx(1 / 30 * 1 / 9)
    assert answer["label_mass"] == pytest.approx(0.5)
    assert [len(each.logprob_token_ids) for each in engine.got(Submit)] == [30, 30, 2]


def test_a_temperature_makes_probabilities_less_extreme(
    start_server: StartServer, server: Server, engine: ScriptedEngine
) -> None:
    engine.behaviour.label_logprobs = logs(0.64, 0.16)
    one = ok(ask(server, {"a": ANGRY})).json()["answers"]["a"]
    two = ok(ask(server, {"a": ANGRY}, temperature=2)).json()["answers"]["a"]
    assert one["noul"] == pytest.approx(0.8) and two["noul"] == pytest.approx(2 / 3)
    assert one["label_mass"] == two["label_mass"] == pytest.approx(0.8)
    other = start_server("--decision-temperature=2")
    other.join("A", context_length=CONTEXT).behaviour.label_logprobs = logs(0.64, 0.16)
    assert ok(ask(other, {"a": ANGRY})).json()["answers"]["a"] == two
    # An engine's own setting is that of its model.
    own = other.join_as("own", context_length=CONTEXT, options={"decision_temperature": 1.0})
    own.behaviour.label_logprobs = logs(0.64, 0.16)
    assert ok(ask(other, {"a": ANGRY}, model="own")).json()["answers"]["a"] == one


@pytest.mark.parametrize(
    ("state", "shown"),
    [
        ({"z": 1, "a": ["ü", None]}, '{"z":1,"a":["ü",null]}\n\nQuestion'),
        ([1, "x"], '[1,"x"]\n\nQuestion'),
        ("<|im_end|> Question", "<|im_end|> Question\n\nQuestion"),
        (None, "<|im_start|>user\nQuestion: Angry?"),
    ],
    ids=["object", "array", "control-token", "null"],
)
def test_a_state_is_text_or_json_in_its_order(
    server: Server, engine: ScriptedEngine, state: Any, shown: str
) -> None:
    ok(ask(server, {"a": ANGRY}, state))
    (submit,) = engine.got(Submit)
    assert shown in prompts_of(engine)[0]
    ends = submit.token_ids.count(engine.tokenizer.token_to_id("<|im_end|>"))
    assert ends == 2  # of the system message, and of the question


def test_instructions_and_criteria_may_be_json(server: Server, engine: ScriptedEngine) -> None:
    ok(
        ask(
            server,
            {
                "a": {"type": "noul", "criteria": {"true": {"x": 1}, "false": None}},
                "b": {"type": "score", "instructions": ["how"], "criteria": [{"bad": 1}, "good"]},
            },
        )
    )
    assert 'Question: What applies?\nA: {"x":1}\nAnswer A or B' in prompts_of(engine)[0]
    assert 'Question: ["how"]\n0. {"bad":1}\n1. good\n' in prompts_of(engine)[1]


BAD_STATES: list[tuple[Any, str]] = [
    ({"questions": {"a": ANGRY}}, "state"),
    ({"state": "x", "questions": []}, "questions"),
    ({"state": "x", "questions": {}}, "questions"),
    ({"state": "x", "questions": {str(n): ANGRY for n in range(401)}}, "questions"),
    ({"state": "x", "questions": {"a": 5}}, "questions.a"),
    ({"state": "x", "questions": {"a": {}}}, "questions.a.type"),
    ({"state": "x", "questions": {"a": {"type": "guess"}}}, "questions.a.type"),
    ({"state": "x", "questions": {"a": {"type": "noul"}}}, "questions.a.instructions"),
    ({"state": "x", "questions": {"a": {**ANGRY, "criteria": ["x"]}}}, "questions.a.criteria"),
    ({"state": "x", "questions": {"a": {**ANGRY, "criteria": {"y": "x"}}}}, "questions.a.criteria"),
    ({"state": "x", "questions": {"a": {**TEAM, "criteria": None}}}, "questions.a.criteria"),
    ({"state": "x", "questions": {"a": {**TEAM, "criteria": {}}}}, "questions.a.criteria"),
    ({"state": "x", "questions": {"a": {**TEAM, "criteria": ["a", "a"]}}}, "questions.a.criteria"),
    ({"state": "x", "questions": {"a": {**TEAM, "criteria": [" "]}}}, "questions.a.criteria"),
    (
        {"state": "x", "questions": {"a": {**TEAM, "criteria": [str(n) for n in range(256)]}}},
        "questions.a.criteria",
    ),
    ({"state": "x", "questions": {"a": {**URGENT, "criteria": {}}}}, "questions.a.criteria"),
    (
        {"state": "x", "questions": {"a": {**URGENT, "criteria": ["x"] * 11}}},
        "questions.a.criteria",
    ),
    ({"state": "x", "questions": {"a": {**URGENT, "criteria": [1]}}}, "questions.a.criteria"),
    ({"state": "x", "questions": {"a": {**ANGRY, "threshold": 2}}}, "questions.a.threshold"),
    ({"state": "x", "questions": {"a": ANGRY}, "images": [{}]}, "images[0]"),
]


@pytest.mark.parametrize(("body", "param"), BAD_STATES, ids=range(len(BAD_STATES)))
def test_invalid_questions_by_id_are_named_in_both_forms(
    server: Server, engine: ScriptedEngine, body: dict[str, Any], param: str
) -> None:
    answer = server.post("/v1/systemone", **body)
    error = error_of(answer, 422)
    assert answer.headers["x-typesafe-request-id"] == answer.headers["x-request-id"]
    assert error["param"] == param
    (detail,) = answer.json()["detail"]
    assert ".".join(detail["loc"]) == f"body.{param}" and detail["msg"] == error["message"]
    assert not engine.got(Submit)
    ok(ask(server, {"a": ANGRY}))


CHOICE = {"type": "choice", "instructions": "x", "choices": [{"value": "a"}, {"value": "b"}]}
BAD_LISTS: list[tuple[Any, str]] = [
    ({"input": "x", "questions": {"a": ANGRY}}, "questions"),
    ({"input": "x", "questions": []}, "questions"),
    ({"input": "x", "questions": [PREDICATE] * 401}, "questions"),
    ({"input": "x", "state": "x", "questions": [PREDICATE]}, "state"),
    ({"input": 5, "questions": [PREDICATE]}, "input"),
    ({"input": [], "questions": [PREDICATE]}, "input"),
    ({"input": [{"role": "nobody"}], "questions": [PREDICATE]}, "input[0].role"),
    ({"input": [{"role": "user"}], "questions": [PREDICATE]}, "input[0].content"),
    ({"input": "x", "questions": [{"type": "guess"}]}, "questions[0].type"),
    ({"input": "x", "questions": [{"type": "predicate"}]}, "questions[0].instructions"),
    (
        {"input": "x", "questions": [{**PREDICATE, "instructions": " "}]},
        "questions[0].instructions",
    ),
    (
        {"input": "x", "questions": [{**PREDICATE, "instructions": [{"type": "input_image"}]}]},
        "questions[0].instructions[0]",
    ),
    (
        {"input": "x", "questions": [{**CHOICE, "choices": [{"value": "a"}]}]},
        "questions[0].choices",
    ),
    ({"input": "x", "questions": [{"type": "score", "instructions": "x"}]}, "questions[0].levels"),
    (
        {"input": "x", "questions": [{**CHOICE, "choices": [{"value": True}] * 2}]},
        "questions[0].choices[1].value",
    ),
    (
        {"input": "x", "questions": [{**CHOICE, "choices": [{"value": 1}, {"value": "a"}]}]},
        "questions[0].choices[0].value",
    ),
]


@pytest.mark.parametrize(("body", "param"), BAD_LISTS, ids=range(len(BAD_LISTS)))
def test_invalid_lists_are_named(
    server: Server, engine: ScriptedEngine, body: dict[str, Any], param: str
) -> None:
    answer = server.post("/v1/decisions", **body)
    error = error_of(answer)
    assert error["param"] == param and answer.json()["detail"] == error["message"]
    assert not engine.got(Submit)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 0}, "temperature"),
        ({"temperature": 1e9}, "temperature"),
        ({"samples": 0}, "samples"),
        ({"samples": 9}, "samples"),
        ({"samples": 1.5}, "samples"),
        ({"images": 5}, "images"),
        ({"images": ["data:image/png;base64,AAAA"]}, "images[0].type"),
        ({"model": 5}, "model"),
        ({"stream": True}, "stream"),
        ({"assets": {"a": {}}}, "assets"),
        ({"audio": "x"}, "audio"),
        ({"think": True}, "think"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"enable_thinking": True}, "enable_thinking"),
        ({"priority": "x"}, "priority"),
        ({"cache_salt": 1}, "cache_salt"),
    ],
    ids=str,
)
def test_fields_that_cannot_be_served_are_named(
    server: Server, engine: ScriptedEngine, fields: dict[str, Any], param: str
) -> None:
    answer = ask(server, {"a": ANGRY}, **fields)
    error = error_of(answer)
    assert error["param"] == param and answer.json()["detail"] == error["message"]
    if param.startswith(("think", "reasoning", "enable")):
        assert "first token" in error["message"]


def test_other_fields_of_newer_clients_are_ignored(server: Server, engine: ScriptedEngine) -> None:
    ok(ask(server, {"a": {**ANGRY, "weight": 2}}, keep_alive=5, later={"x": 1}, think=False))
    ok(ask_listed(server, PREDICATE, prompt_cache_key="k", safety_identifier="s"))


def test_boxes_are_refused_by_name(server: Server, engine: ScriptedEngine) -> None:
    error = error_of(ask(server, {"a": {"type": "box", "instructions": "the dog"}}))
    assert error["param"] == "questions.a.type" and "box" in error["message"]


def test_other_errors_have_both_forms_too(server: Server, engine: ScriptedEngine) -> None:
    answer = ask(server, {"a": ANGRY}, model="nobody")
    assert error_of(answer, 404)["code"] == "model_not_found"
    assert answer.json()["detail"] == answer.json()["error"]["message"]
    broken = server.client.post("/v1/systemone", content=b"{")
    assert error_of(broken)["code"] == "invalid_json" and broken.json()["detail"]
    form = server.client.post("/v1/systemone", files={"request": b"{}"})
    assert error_of(form, 415) and form.json()["detail"]
    assert server.client.get("/v1/systemone").status_code == 405


def test_a_state_that_is_too_long_is_an_error_and_never_truncated(
    server: Server, engine: ScriptedEngine
) -> None:
    error = error_of(ask(server, {"a": ANGRY}, "x" * CONTEXT))
    assert (error["code"], error["param"]) == ("context_length_exceeded", "state")
    error = error_of(ask_listed(server, PREDICATE, input="x" * CONTEXT))
    assert (error["code"], error["param"]) == ("context_length_exceeded", "input")
    long = {"type": "noul", "instructions": "y" * CONTEXT}
    error = error_of(ask(server, {"a": ANGRY, "long": long}, "x"))
    assert (error["code"], error["param"]) == ("context_length_exceeded", "questions.long")
    assert not engine.got(Submit)


def test_a_model_for_another_task_is_an_error_with_the_reason(server: Server) -> None:
    server.join_as("vectors", task="embed", text_task=TextTask(dimensions=4))
    error = error_of(ask(server, {"a": ANGRY}, model="vectors"), 501)
    assert "embeds texts" in error["message"]


def test_requests_that_need_too_many_prompts_are_refused_before_they_cost(
    server: Server, engine: ScriptedEngine
) -> None:
    options = {"type": "choice", "instructions": "?", "criteria": [str(n) for n in range(255)]}
    began = time.monotonic()
    answer = ask(server, {str(n): options for n in range(400)}, samples=8)
    error = error_of(answer)
    assert (error["code"], error["param"]) == ("request_too_large", "questions")
    long = {"type": "noul", "instructions": "y" * 6000}
    answer = ask(server, {str(n): long for n in range(400)}, samples=8)
    assert error_of(answer)["code"] == "request_too_large" and "characters" in answer.text
    tags = {"type": "multi_label", "instructions": "y" * 7000, "criteria": options["criteria"]}
    answer = ask(server, {str(n): tags for n in range(3)})
    assert error_of(answer)["code"] == "request_too_large" and "characters" in answer.text
    assert time.monotonic() - began < 5
    assert not engine.got(Submit)


def test_many_questions_take_few_places_at_a_time(server: Server, engine: ScriptedEngine) -> None:
    engine.behaviour.hold_tokens_after = 0
    answer = begin(ask, server, {str(n): ANGRY for n in range(100)})
    eventually(lambda: len(engine.running) == PROMPTS_AT_ONCE)
    time.sleep(0.1)
    assert len(engine.running) == PROMPTS_AT_ONCE
    engine.behaviour.hold_tokens_after = None
    assert len(ok(answer.result()).json()["answers"]) == 100
    assert len(engine.got(Submit)) == 100
    assert not engine.running


def test_a_client_that_leaves_frees_everything(server: Server, engine: ScriptedEngine) -> None:
    engine.behaviour.hold_tokens_after = 0
    questions = {str(n): ANGRY for n in range(100)}
    with pytest.raises(httpx.ReadTimeout):
        server.client.post(
            "/v1/systemone", json={"state": "x", "questions": questions}, timeout=0.5
        )
    eventually(lambda: not engine.running)
    assert len(engine.got(Submit)) == PROMPTS_AT_ONCE
    engine.behaviour.hold_tokens_after = None
    ok(ask(server, {"a": ANGRY}))
    assert len(engine.got(Submit)) == PROMPTS_AT_ONCE + 1


def test_a_failed_prompt_ends_the_whole_request(server: Server, engine: ScriptedEngine) -> None:
    engine.behaviour.label_logprobs = lambda submit: [math.nan] * len(submit.logprob_token_ids)
    answer = ask(server, {str(n): ANGRY for n in range(50)})
    assert error_of(answer, 500) and answer.json()["detail"]
    eventually(lambda: not engine.running)
    engine.behaviour.label_logprobs = logs(0.5, 0.5)
    ok(ask(server, {"a": ANGRY}))


def test_another_engine_goes_on_for_one_that_dies(server: Server, engine: ScriptedEngine) -> None:
    engine.behaviour.hold_tokens_after = 0
    answer = begin(ask, server, {str(n): ANGRY for n in range(20)})
    eventually(lambda: len(engine.running) == PROMPTS_AT_ONCE)
    engine.kill()
    other = server.start_engine("A", name="engine-1", context_length=CONTEXT, max_sequences=64)
    assert len(ok(answer.result()).json()["answers"]) == 20
    assert not other.running


def test_a_dead_engine_without_another_is_an_error(start_server: StartServer) -> None:
    server = start_server("--restart-wait-s=0.5", "--request-timeout-s=5")
    engine = server.join("A", context_length=CONTEXT)
    engine.behaviour.hold_tokens_after = 0
    answer = begin(ask, server, {str(n): ANGRY for n in range(3)})
    eventually(lambda: len(engine.running) == 3)
    engine.kill()
    found = answer.result()
    assert error_of(found, 503)["code"] == "engine_lost" and found.json()["detail"]
    assert int(found.headers["retry-after"]) >= 1


def test_an_engine_of_an_older_release_is_named(server: Server, engine: ScriptedEngine) -> None:
    engine.behaviour.ignores_named_tokens = True
    error = error_of(ask(server, {"a": ANGRY}), 503)
    assert error["code"] == "engine_too_old"


def test_requests_count_as_those_of_chats_do(start_server: StartServer, tmp_path: Any) -> None:
    server = start_server(key_flag(tmp_path, "sesame concurrency=1", "other"))
    engine = server.join("A", context_length=CONTEXT, cached_tokens=16)
    assert error_of(ask(server, {"a": ANGRY}), 401)["code"] == "invalid_api_key"
    server.client.headers.update(bearer("sesame"))
    answer = ok(ask(server, {"a": ANGRY, "b": ANGRY}))
    assert answer.json()["usage"]["cached_tokens"] == 16
    assert server.metric('decisions_total{model="tiny"} ') == 2
    assert server.metric('requests_total{path="/v1/systemone",status="200"} ') == 1
    engine.behaviour.hold_tokens_after = 0
    first = begin(ask, server, {"a": ANGRY})
    eventually(lambda: bool(engine.running))
    second = ask(server, {"a": ANGRY})
    assert error_of(second, 429)["code"] == "too_many_concurrent_requests"
    assert second.headers["retry-after"] and second.json()["detail"]
    engine.behaviour.hold_tokens_after = None
    ok(first.result())
    engine.behaviour.stats = EngineStats(limit_bytes=100, unevictable_bytes=100)
    eventually(lambda: ask(server, {"a": ANGRY}).status_code == 503)


def test_clients_find_the_models_that_decide(server: Server, engine: ScriptedEngine) -> None:
    server.join_as("vectors", task="embed", text_task=TextTask(dimensions=4))
    listed = server.client.get("/v1/models").json()
    (model,) = listed["models"]
    assert model["name"] == "tiny" and model["description"]
    assert time.strptime(model["release_date"], "%Y-%m-%d")
    assert len(listed["data"]) == 2
    shown = server.post("/api/show", model="tiny").json()
    assert "decision" in shown["capabilities"]
    assert "decision" not in server.post("/api/show", model="vectors").json()["capabilities"]
