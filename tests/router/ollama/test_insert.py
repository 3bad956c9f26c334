"""Fill-in-the-middle in Ollama's form: ``suffix`` in `/api/generate`, and the capability."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shared.wire import Submit
from tests.fim_tokens import FIM
from tests.router.chat_tokenizer import TEMPLATE
from tests.router.conftest import Server, StartServer, ok
from tests.router.scripted_engine import ScriptedEngine
from tests.router.tiny_tokenizer import CONTEXT

FLAGS = ("--max-request-bytes=200000",)
GAP = {"model": "tiny", "prompt": "def f(", "suffix": "):"}


@pytest.fixture(scope="module")
def model_dir(fim_model_dir: Path) -> Path:
    return fim_model_dir


def test_a_suffix_makes_the_models_own_prompt(server: Server, engine: ScriptedEngine) -> None:
    engine.says(" hello")
    body = ok(server.post("/api/generate", **GAP, stream=False, options={"num_predict": 9})).json()
    assert engine.last_prompt == "<|fim_prefix|>def f(<|fim_suffix|>):<|fim_middle|>"
    assert (body["response"], body["done_reason"]) == (" hello", "stop")
    assert "context" not in body
    submit = engine.got(Submit)[-1]
    assert submit.max_tokens == 9
    assert {*submit.stop_token_ids} >= {engine.tokenizer.token_to_id(each) for each in FIM}
    *lines, last = map(json.loads, ok(server.post("/api/generate", **GAP)).text.splitlines())
    assert "".join(line["response"] for line in lines) == " hello"
    assert last["done"] and "context" not in last


def test_a_suffix_alone_is_a_request(server: Server, engine: ScriptedEngine) -> None:
    ok(server.post("/api/generate", model="tiny", suffix="x"))
    assert engine.last_prompt == "<|fim_prefix|><|fim_suffix|>x<|fim_middle|>"
    answer = ok(server.post("/api/generate", model="tiny", prompt="", suffix=""))
    assert answer.json()["done_reason"] == "load"
    ok(server.post("/api/generate", model="tiny", prompt="x", suffix=""))
    assert engine.last_prompt.startswith("<|im_start|>user")


def test_the_text_around_the_gap_fits_num_ctx(server: Server, engine: ScriptedEngine) -> None:
    fields = {"model": "tiny", "prompt": "x" * 9000, "suffix": "y" * 9000}
    for options, room in (
        ({"num_predict": 8}, CONTEXT - 8),
        ({"num_predict": 8, "num_ctx": 64}, 56),
        ({"num_ctx": 64}, 32),
        ({"num_predict": 8, "num_ctx": 10**6}, CONTEXT - 8),
    ):
        ok(server.post("/api/generate", **fields, options=options))
        assert len(engine.got(Submit)[-1].token_ids) == room


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"raw": True}, "'raw' cannot be combined with 'suffix'"),
        ({"system": "x"}, "'suffix' cannot be combined with 'system'"),
        ({"context": [1]}, "'suffix' cannot be combined with 'context'"),
        ({"images": ["x"]}, "'suffix' cannot be combined with 'images'"),
        ({"suffix": 5}, "'suffix'"),
    ],
)
def test_errors_are_named(
    server: Server, engine: ScriptedEngine, fields: dict[str, Any], named: str
) -> None:
    answer = server.post("/api/generate", **{**GAP, **fields})
    assert answer.status_code == 400 and named in answer.json()["error"]


def test_the_capability_is_shown(
    server: Server, engine: ScriptedEngine, start_server: StartServer, plain_model_dir: Path
) -> None:
    shown = ok(server.post("/api/show", name="tiny")).json()
    assert "insert" in shown["capabilities"]
    # A sign for Continue, which is no part of the template.
    before, _, after = shown["template"].rpartition("{#")
    assert before == TEMPLATE.strip("\n") or before == TEMPLATE
    assert "<|fim_prefix|>{{ .Prompt }}<|fim_suffix|>{{ .Suffix }}<|fim_middle|>" in after
    (listed,) = ok(server.client.get("/api/tags")).json()["models"]
    assert "insert" in listed["capabilities"]
    other = start_server(*FLAGS)
    other.join("hello", directory=plain_model_dir)
    shown = ok(other.post("/api/show", name="tiny")).json()
    assert "insert" not in shown["capabilities"] and ".Suffix" not in shown["template"]
    answer = other.post("/api/generate", **GAP)
    assert answer.status_code == 400
    assert "tiny does not support insert" in answer.json()["error"]
