"""Fill-in-the-middle in OpenAI's form, ``suffix`` in text completions, and in Mistral's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shared.wire import Submit
from tests.fim_tokens import FIM
from tests.router.conftest import Server, StartServer, error_of, events, ok
from tests.router.scripted_engine import ScriptedEngine
from tests.router.tiny_tokenizer import CONTEXT

FLAGS = ("--max-request-bytes=200000",)
GAP = {"prompt": "def f(", "suffix": "):\n"}
WHOLE = "<|fim_prefix|>def f(<|fim_suffix|>):\n<|fim_middle|>"


@pytest.fixture(scope="module")
def model_dir(fim_model_dir: Path) -> Path:
    return fim_model_dir


def ids_of(engine: ScriptedEngine, *texts: str) -> list[int]:
    return [engine.tokenizer.token_to_id(text) for text in texts]


def test_a_suffix_makes_the_models_own_prompt(server: Server, engine: ScriptedEngine) -> None:
    answer = ok(server.post("/v1/completions", **GAP)).json()
    assert engine.last_prompt == WHOLE
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("hello world", "stop")
    submit = engine.got(Submit)[-1]
    assert {*submit.stop_token_ids} >= {*ids_of(engine, *FIM)}
    ok(server.post("/v1/completions", **GAP, ignore_eos=True))
    assert engine.got(Submit)[-1].stop_token_ids == []
    (chunk, *_, last) = events(ok(server.post("/v1/completions", **GAP, stream=True)).text)
    assert chunk["choices"][0]["text"] and last["choices"][0]["finish_reason"] == "stop"


def test_no_suffix_is_no_gap(server: Server, engine: ScriptedEngine) -> None:
    for suffix in (None, ""):
        ok(server.post("/v1/completions", prompt="def f(", suffix=suffix))
        assert engine.last_prompt == "def f("
    assert {*engine.got(Submit)[-1].stop_token_ids}.isdisjoint(ids_of(engine, *FIM))


def test_a_token_of_the_family_ends_the_answer_and_is_not_shown(
    server: Server, engine: ScriptedEngine
) -> None:
    ids = engine.tokenizer.encode("hello<|file_sep|> world").ids
    engine.behaviour.script = lambda _: ids
    (choice,) = ok(server.post("/v1/completions", **GAP)).json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("hello", "stop")


def test_each_of_several_prompts_has_the_suffix(server: Server, engine: ScriptedEngine) -> None:
    prompts = ["a", "", "b<|fim_suffix|>"]
    fields: dict[str, Any] = {"n": 2, "logprobs": 1, "max_tokens": 3}
    answer = ok(server.post("/v1/completions", prompt=prompts, suffix="s", **fields)).json()
    assert len(answer["choices"]) == 6
    assert all(len(choice["logprobs"]["tokens"]) == 3 for choice in answer["choices"])
    found = [engine.tokenizer.decode(each.token_ids, False) for each in engine.got(Submit)]
    assert found[::2] == found[1::2]
    assert found[::2] == [f"<|fim_prefix|>{each}<|fim_suffix|>s<|fim_middle|>" for each in prompts]
    spelled = engine.got(Submit)[-1].token_ids
    assert spelled.count(ids_of(engine, "<|fim_suffix|>")[0]) == 1
    tokens = engine.tokenizer.encode("def f(").ids
    ok(server.post("/v1/completions", prompt=tokens, suffix="):\n"))
    assert engine.last_prompt == WHOLE


def test_the_text_around_the_gap_fits_the_context(server: Server, engine: ScriptedEngine) -> None:
    prefix = "".join(f"{number}," for number in range(10_000))
    fields = {"prompt": prefix, "suffix": prefix}
    for max_tokens, room in ((12, CONTEXT - 12), (None, CONTEXT // 2), (10**6, CONTEXT // 2)):
        ok(server.post("/v1/completions", **fields, max_tokens=max_tokens))
        submit = engine.got(Submit)[-1]
        assert len(submit.token_ids) == room
        assert submit.max_tokens >= min(max_tokens or 512, CONTEXT // 2)
        start, middle, end = (
            submit.token_ids.index(token)
            for token in ids_of(engine, "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
        )
        assert (start, end) == (0, room - 1)
        assert end - middle - 1 == (room - 3) // 4
        decode = engine.tokenizer.decode
        assert prefix.endswith(decode(submit.token_ids[1:middle]))
        assert prefix.startswith(decode(submit.token_ids[middle + 1 : end]))


def test_errors_of_gaps_are_named(server: Server, engine: ScriptedEngine) -> None:
    error = error_of(server.post("/v1/completions", **GAP, echo=True))
    assert error["param"] == "echo" and "'suffix'" in error["message"]
    ok(server.post("/v1/completions", prompt="x", suffix="", echo=True))
    wrong: Any
    for wrong in (5, ["x"], {}, True):
        assert error_of(server.post("/v1/completions", prompt="x", suffix=wrong))["param"] == (
            "suffix"
        )
    assert error_of(server.chat(suffix="x"))["param"] == "suffix"
    assert error_of(server.post("/v1/completions", prompt=[10**6], suffix="x"))["param"] == (
        "prompt"
    )


def test_a_model_without_the_tokens_says_so(
    start_server: StartServer, plain_model_dir: Path
) -> None:
    server = start_server(*FLAGS)
    engine = server.join("hello world", directory=plain_model_dir)
    error = error_of(server.post("/v1/completions", **GAP))
    assert (error["param"], error["code"]) == ("suffix", "unsupported_parameter")
    assert "tiny does not support insert" in error["message"]
    assert not engine.got(Submit)


@pytest.mark.parametrize(
    ("layout", "prompt"),
    [
        (
            "<|fim_suffix|>{suffix}<|fim_prefix|>{prefix}<|fim_middle|>",
            "<|fim_suffix|>):\n<|fim_prefix|>def f(<|fim_middle|>",
        ),
        ("none", None),
        ("<A>{prefix}<B>{suffix}", None),
    ],
)
def test_the_layout_can_be_set(layout: str, prompt: str | None, start_server: StartServer) -> None:
    server = start_server(*FLAGS)
    engine = server.join("hello world", options={"fim_layout": layout})
    (model,) = server.client.get("/v1/models").json()["data"]
    assert ("insert" in model["capabilities"]) == (prompt is not None)
    answer = server.post("/v1/completions", **GAP)
    if prompt is None:
        assert error_of(answer)["param"] == "suffix"
    else:
        ok(answer)
        assert engine.last_prompt == prompt


@pytest.mark.parametrize("path", ["/v1/fim/completions", "/fim/completions"])
def test_mistrals_answers_are_chat_completions(
    path: str, server: Server, engine: ScriptedEngine
) -> None:
    fields: dict[str, Any] = {"random_seed": 7, "temperature": 0.5, "min_tokens": 1}
    answer = ok(server.post(path, model="tiny", **GAP, **fields))
    assert engine.last_prompt == WHOLE
    body = answer.json()
    assert body["object"] == "chat.completion" and body["usage"]["completion_tokens"] == 5
    (choice,) = body["choices"]
    assert choice["message"]["content"] == "hello world" and choice["finish_reason"] == "stop"
    submit = engine.got(Submit)[-1]
    assert (submit.sampling.seed, submit.sampling.temperature, submit.min_tokens) == (7, 0.5, 1)
    assert answer.headers["x-seed"] == "7"
    assert {*submit.stop_token_ids} >= {*ids_of(engine, *FIM)}


def test_every_chunk_of_mistrals_has_content(server: Server, engine: ScriptedEngine) -> None:
    for include in (False, True):
        options = {"stream": True, "stream_options": {"include_usage": include}}
        chunks = events(ok(server.post("/v1/fim/completions", **GAP, **options)).text)
        last = chunks.pop() if include else chunks[-1]
        assert last["usage"]["completion_tokens"] == 5
        contents = [chunk["choices"][0]["delta"]["content"] for chunk in chunks]
        assert "".join(contents) == "hello world"
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
        assert chunks[-1]["usage"]["prompt_tokens"] == len(engine.got(Submit)[-1].token_ids)
        assert all(not chunk.get("usage") for chunk in chunks[:-1])


def test_a_gap_of_mistrals_may_have_nothing_around_it(
    server: Server, engine: ScriptedEngine
) -> None:
    for suffix in ("", None):
        ok(server.post("/v1/fim/completions", prompt="", suffix=suffix))
        assert engine.last_prompt == "<|fim_prefix|><|fim_suffix|><|fim_middle|>"
    engine.says(" x")
    (choice,) = ok(server.post("/v1/fim/completions", **GAP)).json()["choices"]
    assert choice["message"]["content"] == " x"


def test_errors_of_mistrals_gaps_are_named(
    server: Server, engine: ScriptedEngine, start_server: StartServer, plain_model_dir: Path
) -> None:
    for fields, param in (
        ({"suffix": "x"}, "prompt"),
        ({"prompt": ["x"]}, "prompt"),
        ({"prompt": "x", "suffix": 5}, "suffix"),
        ({"prompt": "x", "random_seed": "x"}, "random_seed"),
        ({"prompt": "x", "random_seed": 1, "seed": 2}, "random_seed"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "x", "stop": [5]}, "stop[...]"),
    ):
        found = error_of(server.post("/v1/fim/completions", **fields))["param"]
        assert found == param or found.startswith("stop"), fields
    other = start_server(*FLAGS)
    other.join("hello", directory=plain_model_dir)
    error = error_of(other.post("/v1/fim/completions", **GAP))
    assert (error["param"], error["code"]) == ("model", "unsupported_parameter")
