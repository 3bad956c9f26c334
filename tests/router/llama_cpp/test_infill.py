"""llama.cpp's `/infill`, as llama.vscode and llama.vim call it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.llama_cpp.parsers import LimitedReplyParser
from shared.wire import Submit
from tests.fim_tokens import FIM
from tests.router.conftest import Server, StartServer, error_of, eventually, ok
from tests.router.scripted_engine import ScriptedEngine
from tests.router.tiny_tokenizer import CONTEXT

FLAGS = ("--max-request-bytes=200000",)
GAP: dict[str, Any] = {"input_prefix": "a\n", "input_suffix": "c", "prompt": "b"}
WHOLE = "<|fim_prefix|>a\nb<|fim_suffix|>c<|fim_middle|>"
SENT_BY_VSCODE: dict[str, Any] = {
    **GAP,
    "input_extra": [{"text": "x = 1\n", "time": 1764400000000, "filename": "x.py"}],
    "n_predict": 128,
    "top_k": 40,
    "top_p": 0.99,
    "stream": False,
    "samplers": ["top_k", "top_p", "infill"],
    "cache_prompt": True,
    "n_indent": 4,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 1000,
}
"""A body of llama.vscode (``createRequestPayload`` in ``src/llama-server.ts``)."""
WARMING: dict[str, Any] = {
    "input_prefix": "",
    "input_suffix": "",
    "input_extra": SENT_BY_VSCODE["input_extra"],
    "prompt": "",
    "n_predict": 0,
    "samplers": [],
    "cache_prompt": True,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 1,
}
SENT_BY_VIM: dict[str, Any] = {
    **SENT_BY_VSCODE,
    "response_fields": [
        *("content", "timings/prompt_n", "timings/prompt_ms", "timings/prompt_per_token_ms"),
        *("timings/prompt_per_second", "timings/predicted_n", "timings/predicted_ms"),
        *("timings/predicted_per_token_ms", "timings/predicted_per_second"),
        *("truncated", "tokens_cached"),
    ],
}
"""A body of llama.vim (``llama#fim`` in ``autoload/llama.vim``)."""


@pytest.fixture(scope="module")
def model_dir(fim_model_dir: Path) -> Path:
    return fim_model_dir


def infill(server: Server, /, **fields: Any) -> httpx.Response:
    return server.post("/infill", **{**GAP, **fields})


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(each.removeprefix("data: ")) for each in text.split("\n\n") if each]


def test_the_answer_has_llama_cpps_form(server: Server, engine: ScriptedEngine) -> None:
    engine.behaviour.cached_tokens = 2
    body = ok(infill(server, n_predict=50, stop=["!"], seed=7)).json()
    assert engine.last_prompt == WHOLE
    submit = engine.got(Submit)[-1]
    timings = body.pop("timings")
    assert body == {
        "index": 0,
        "content": "hello world",
        "tokens": [],
        "id_slot": -1,
        "stop": True,
        "tokens_predicted": 5,
        "tokens_evaluated": len(submit.token_ids),
        "model": "tiny",
        "generation_settings": {
            "n_predict": 50,
            "seed": 7,
            "temperature": 0.0,
            "top_k": 0,
            "top_p": 1.0,
            "min_p": 0.0,
            "stop": ["!"],
        },
        "has_new_line": False,
        "truncated": False,
        "stop_type": "eos",
        "stopping_word": "",
        "tokens_cached": 2,
    }
    assert (timings["cache_n"], timings["prompt_n"], timings["predicted_n"]) == (
        *(2, len(submit.token_ids) - 2, 5),
    )
    assert timings["prompt_ms"] > 0 and timings["predicted_per_second"] >= 0
    assert {*submit.stop_token_ids} >= {engine.tokenizer.token_to_id(each) for each in FIM}


def test_what_ended_the_text_is_told(server: Server, engine: ScriptedEngine) -> None:
    for fields, told in (
        ({"stop": "wor"}, ("hello ", "word", "wor")),
        ({"n_predict": 1}, ("hello", "limit", "")),
        ({"stop": []}, ("hello world", "eos", "")),
    ):
        body = ok(infill(server, **fields)).json()
        assert (body["content"], body["stop_type"], body["stopping_word"]) == told


def test_a_stream_ends_with_the_figures(server: Server, engine: ScriptedEngine) -> None:
    engine.says("a\nb")
    answer = ok(infill(server, stream=True))
    assert answer.headers["content-type"].startswith("text/event-stream")
    *parts, last = lines(answer.text)
    assert "".join(each["content"] for each in parts) == "a\nb"
    assert not any(each["stop"] for each in parts)
    assert (last["stop"], last["content"], last["has_new_line"]) == (True, "", True)
    assert last["tokens_predicted"] == last["timings"]["predicted_n"] == 4
    engine.behaviour.computed_prompt_tokens = 3
    assert lines(infill(server, stream=True, return_progress=True).text)


def test_other_files_come_first(server: Server, engine: ScriptedEngine) -> None:
    files = [{"text": "x = 1\n", "filename": "x.py"}, {"text": "<|file_sep|>y"}]
    ok(infill(server, input_extra=files))
    assert engine.last_prompt == (
        "<|repo_name|>myproject\n<|file_sep|>x.py\nx = 1\n<|file_sep|>tmp\n<|file_sep|>y"
        f"<|file_sep|>filename\n{WHOLE}"
    )
    separator = engine.tokenizer.token_to_id("<|file_sep|>")
    assert engine.got(Submit)[-1].token_ids.count(separator) == 3


def test_bodies_of_editors_are_answered(server: Server, engine: ScriptedEngine) -> None:
    body = ok(server.post("/infill", **SENT_BY_VSCODE)).json()
    assert body["content"] == "hello world" and body["timings"]["predicted_n"] == 5
    sampling = engine.got(Submit)[-1].sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.0, 40, 0.99)
    found = ok(server.post("/infill", **SENT_BY_VIM)).json()
    assert list(found) == SENT_BY_VIM["response_fields"]
    assert found["content"] == "hello world" and found["timings/predicted_n"] == 5


def test_nothing_is_generated_to_fill_the_cache(server: Server, engine: ScriptedEngine) -> None:
    body = ok(server.post("/infill", **WARMING)).json()
    assert (body["content"], body["tokens_predicted"], body["stop_type"]) == ("", 0, "limit")
    assert body["timings"]["predicted_n"] == body["timings"]["predicted_ms"] == 0
    assert body["generation_settings"]["n_predict"] == 0
    warm = engine.got(Submit)[-1]
    assert warm.max_tokens == 1
    ok(server.post("/infill", **SENT_BY_VSCODE))
    shared = len(warm.token_ids) - 2  # up to the prefix
    assert engine.got(Submit)[-1].token_ids[:shared] == warm.token_ids[:shared]
    of_vim = {**WARMING, "temperature": 0.0, "response_fields": [""]}
    assert ok(server.post("/infill", **of_vim)).json() == {}
    (last,) = lines(ok(server.post("/infill", **{**WARMING, "stream": True})).text)
    assert (last["content"], last["stop"]) == ("", True)


def test_a_line_with_less_indentation_ends_the_text(server: Server, engine: ScriptedEngine) -> None:
    engine.says("x\n    hello\n  world")
    body = ok(infill(server, n_indent=4)).json()
    assert (body["content"], body["stop_type"]) == ("x\n    hello\n  ", "limit")
    assert ok(infill(server, n_indent=2)).json()["content"] == "x\n    hello\n  world"
    parts = lines(ok(infill(server, n_indent=4, stream=True)).text)
    assert "".join(each["content"] for each in parts) == "x\n    hello\n  "


def test_the_time_ends_the_text_after_its_first_line(
    server: Server, engine: ScriptedEngine
) -> None:
    engine.says("hello\n" + "hello" * 1000)
    engine.behaviour.step_s = 0.02
    body = ok(infill(server, t_max_predict_ms=100, n_predict=400)).json()
    assert body["content"].startswith("hello\n") and body["stop_type"] == "limit"
    assert 1 < body["tokens_predicted"] < 100
    eventually(lambda: not engine.running)
    for unlimited in (0, -1, None):
        body = ok(infill(server, t_max_predict_ms=unlimited, n_predict=12)).json()
        assert body["tokens_predicted"] == 12
    engine.says("hello" * 30)  # one line
    assert ok(infill(server, t_max_predict_ms=1)).json()["tokens_predicted"] == 31


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_limits_of_lines_do_not_depend_on_pieces(size: int) -> None:
    text = " x\n\t  y\n   \n  z\n a"
    for indent, expected in (
        (0, text),
        (1, " x\n\t  y\n   \n  z\n a"),
        (2, " x\n\t  y\n   \n  z\n "),
        (3, " x\n\t  y\n   \n  "),
        (4, " x\n\t  "),
    ):
        parser = LimitedReplyParser(None, indent)
        pieces = [text[start : start + size] for start in range(0, len(text), size)]
        shown = "".join(part.text for piece in pieces for part in parser.feed(piece))
        assert shown == expected and parser.complete == (shown != text)


def test_time_counts_from_the_first_token() -> None:
    now = 5.0
    parser = LimitedReplyParser(1.0, 0, clock=lambda: now)
    parser.feed("a")
    now = 7.0
    assert parser.feed("b") and not parser.complete  # no line yet
    parser.feed("\n")
    assert parser.complete and not parser.feed("c")
    parser = LimitedReplyParser(1.0, 0, clock=lambda: now)
    parser.feed("\n")
    now = 7.9
    parser.feed("d")
    assert not parser.complete


def test_what_does_not_fit_is_left_out_and_told(server: Server, engine: ScriptedEngine) -> None:
    big = "".join(f"{number}," for number in range(9000))
    files = [{"text": big, "filename": "big.py"}, {"text": "hello\n", "filename": "x.py"}]
    body = ok(infill(server, input_extra=files, n_predict=32)).json()
    assert body["truncated"] and "x.py" in engine.last_prompt and "big" not in engine.last_prompt
    body = ok(infill(server, input_prefix=big, input_suffix=big, n_predict=32)).json()
    assert body["truncated"] and body["tokens_evaluated"] == CONTEXT - 32
    assert "8999,b<|fim_suffix|>0,1," in engine.last_prompt
    assert not ok(infill(server, n_predict=32)).json()["truncated"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input_prefix": None}, "input_prefix"),
        ({"input_prefix": ["x"]}, "input_prefix"),
        ({"input_suffix": 5}, "input_suffix"),
        ({"prompt": 5}, "prompt"),
        ({"input_extra": "x"}, "input_extra"),
        ({"input_extra": [{"filename": "x"}]}, "input_extra[...].text"),
        ({"input_extra": [{"text": 5}]}, "input_extra[...].text"),
        ({"input_extra": [{"text": ""}] * 1025}, "input_extra"),
        ({"n_predict": -3}, "n_predict"),
        ({"n_predict": 1.5}, "n_predict"),
        ({"n_indent": -1}, "n_indent"),
        ({"t_max_predict_ms": "1"}, "t_max_predict_ms"),
        ({"t_max_predict_ms": -2}, "t_max_predict_ms"),
        ({"samplers": 5}, "samplers"),
        ({"response_fields": "content"}, "response_fields"),
        ({"response_fields": ["x"] * 65}, "response_fields"),
        ({"temperature": 3}, "temperature"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"n": 2}, "n"),
        ({"n_cmpl": 2}, "n"),
        ({"lora": [{"id": 0, "scale": 0.5}]}, "lora"),
        ({"mirostat": 2}, "mirostat"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
    ],
)
def test_bad_fields_are_named(
    server: Server, lasting_engine: ScriptedEngine, fields: dict[str, Any], param: str
) -> None:
    found = error_of(infill(server, **fields))["param"]
    assert found.partition("[")[0] == param.partition("[")[0]


def test_both_texts_are_required(server: Server, lasting_engine: ScriptedEngine) -> None:
    assert error_of(server.post("/infill", input_suffix=""))["param"] == "input_prefix"
    assert error_of(server.post("/infill", input_prefix=""))["param"] == "input_suffix"


def test_a_model_without_the_tokens_is_not_supported(
    start_server: StartServer, plain_model_dir: Path
) -> None:
    server = start_server(*FLAGS)
    engine = server.join("hello", directory=plain_model_dir)
    answer = infill(server)
    error = error_of(answer, 501)
    assert error["code"] == "infill_not_supported"
    assert "Infill is not supported by this model" in error["message"]
    assert answer.headers["x-should-retry"] == "false" and not engine.got(Submit)


def test_an_abandoned_request_ends(start_server: StartServer) -> None:
    server = start_server(*FLAGS)
    engine = server.join("hello world")
    engine.behaviour.hold_tokens_after = 1
    with pytest.raises(httpx.ReadTimeout):
        server.client.post("/infill", json=GAP, timeout=0.5)
    eventually(lambda: not engine.running)
