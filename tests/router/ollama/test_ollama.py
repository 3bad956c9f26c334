"""Ollama's API over a scripted engine."""

from __future__ import annotations

import json
import shutil
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from shared.wire import EngineStats, SamplingParams, Submit
from tests.router.conftest import Server, StartServer, bearer, key_flag, ok
from tests.router.scripted_engine import END, ScriptedEngine

CHAT_MODEL = True
FLAGS = ("--max-generation-tokens=4000", "--max-prompt-tokens=1000")
HI = [{"role": "user", "content": "hi"}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FUNCTION = {"name": "add", "description": "Adds.", "parameters": SCHEMA}
ADD = {"type": "function", "function": FUNCTION}
FIGURES = {
    *("total_duration", "load_duration", "prompt_eval_count", "prompt_eval_duration"),
    *("eval_count", "eval_duration"),
}
CHATS_AND_PROMPTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("chat", {"messages": HI}),
    ("generate", {"prompt": "hi"}),
)
START = "<|im_start|>"


@pytest.fixture
def engine(server: Server) -> ScriptedEngine:
    return server.join("hello world", context_length=2000, vocab_size=300)


def post(server: Server, path: str, **body: Any) -> httpx.Response:
    return server.post(f"/api/{path}", **{"model": "tiny", **body})


def lines(answer: httpx.Response) -> list[Any]:
    assert ok(answer).headers["content-type"] == "application/x-ndjson"
    assert answer.text.endswith("}\n")
    return [json.loads(line) for line in answer.text.splitlines()]


def refused(answer: httpx.Response, status: int = 400) -> str:
    """Check that the answer is an error in Ollama's shape, and return its text."""
    assert answer.status_code == status, answer.text
    (name, error), *others = answer.json().items()
    assert name == "error" and isinstance(error, str) and error and not others
    return error


def last_submit(server: Server, path: str, **body: Any) -> Submit:
    """Return what the engine receives for a request."""
    ok(post(server, path, **body))
    return server.engine.got(Submit)[-1]


def text_of(parts: list[Any]) -> str:
    return "".join(part["message"]["content"] for part in parts)


def test_a_chat_is_streamed_as_lines_with_figures_at_the_end_or_is_one_object(
    served: Server,
) -> None:
    *parts, last = lines(post(served, "chat", messages=HI))
    for part in parts:
        assert part.keys() == {"model", "created_at", "done", "message"}
        assert part["message"].keys() == {"role", "content"} and not part["done"]
        assert datetime.fromisoformat(part["created_at"]).utcoffset() is not None
    assert text_of(parts) == "hello world"
    assert last["done"] and last["done_reason"] == "stop" and last["model"] == "tiny"
    assert last["message"] == {"role": "assistant", "content": ""}
    assert last.keys() >= FIGURES
    (submit,) = served.engine.got(Submit)
    assert last["prompt_eval_count"] == len(submit.token_ids)
    assert last["eval_count"] == len(served.engine.behaviour.script(submit))
    parts_ns = last["load_duration"] + last["prompt_eval_duration"] + last["eval_duration"]
    assert last["eval_duration"] > 0 and parts_ns <= last["total_duration"] < 60 * 10**9
    answer = post(served, "chat", messages=HI, stream=False)
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert body["message"] == {"role": "assistant", "content": "hello world"}
    assert body["done"] and body.keys() >= FIGURES


def test_a_model_has_a_name_with_and_without_latest(served: Server) -> None:
    for name in ("tiny", "tiny:latest"):
        body = post(served, "chat", model=name, messages=HI, stream=False).json()
        assert body["model"] == name, "as it was asked"
    ok(served.chat(model="tiny:latest"))
    assert served.client.get("/v1/models/tiny:latest").json()["id"] == "tiny"
    assert "model not found" in refused(post(served, "chat", model="tiny:7b", messages=HI), 404)
    assert "'model'" in refused(served.client.post("/api/chat", json={"messages": HI}))


def test_line_breaks_of_unicode_divide_no_line(served: Server) -> None:
    served.engine.says("a\u2028b\u2029c\x85d")
    assert text_of(lines(post(served, "chat", messages=HI))) == "a\u2028b\u2029c\x85d"


def test_a_call_comes_whole(served: Server) -> None:
    engine = served.engine
    engine.says(CALL + "\n" + CALL.replace('"a": 1', '"a": 2'))
    parts = lines(post(served, "chat", messages=HI, tools=[ADD]))
    whole = post(served, "chat", messages=HI, tools=[ADD], stream=False).json()["message"]
    streamed = [call for part in parts for call in part["message"].get("tool_calls", ())]
    for calls in (streamed, whole["tool_calls"]):
        assert [call["function"] for call in calls] == [
            {"index": index, "name": "add", "arguments": {"a": index + 1}} for index in (0, 1)
        ]
    assert parts[-1]["done_reason"] == "stop"
    assert '"Adds."' in engine.last_prompt
    engine.says("3")
    result = {"role": "tool", "content": "3", "tool_name": "add"}
    post(served, "chat", messages=[*HI, whole, result], tools=[ADD])
    assert '{"name": "add", "arguments": {"a": 2}}' in engine.last_prompt
    assert f"{START}tool\n[add] 3{END}" in engine.last_prompt


@pytest.mark.parametrize("step", [1, 200])
def test_a_line_has_one_kind_of_thing(served: Server, step: int) -> None:
    engine = served.engine
    engine.says("<think>\nhm\n</think>\n\nI add.\n" + CALL + "\n" + CALL)
    engine.behaviour.tokens_per_step = step
    parts = lines(post(served, "chat", messages=HI, tools=[ADD], think=True))
    engine.behaviour.tokens_per_step = 1
    kinds = list[str]()
    for part in parts:
        found = [
            kind for kind in ("thinking", "content", "tool_calls") if part["message"].get(kind)
        ]
        assert len(found) <= 1 and len(part["message"].get("tool_calls", ())) <= 1
        kinds += found
    assert list(dict.fromkeys(kinds)) == ["thinking", "content", "tool_calls"]
    assert kinds.count("tool_calls") == 2


def test_thinking_is_apart_and_may_be_turned_off(served: Server) -> None:
    engine = served.engine
    engine.says("<think>\nhm\n</think>\n\nyes")
    for path, fields in CHATS_AND_PROMPTS:
        body = post(served, path, think=True, stream=False, **fields).json()
        reply = body.get("message", body)
        assert reply["thinking"].strip() == "hm"
        assert reply.get("content", reply.get("response")) == "yes"
        *parts, _ = lines(post(served, path, think="max", **fields))
        shown = [part.get("message", part) for part in parts]
        assert "".join(part.get("thinking", "") for part in shown).strip() == "hm"
        assert engine.last_prompt.endswith("(effort high)")
    post(served, "chat", think=False, messages=HI)
    assert engine.last_prompt.endswith("<think>\n\n</think>\n\n")
    assert "'think'" in refused(post(served, "chat", think="a lot", messages=HI))


def test_log_probabilities_come_with_the_parts(served: Server) -> None:
    fields = {"logprobs": True, "top_logprobs": 2}
    parts = lines(post(served, "chat", messages=HI, **fields))
    scored = [each for part in parts for each in part.get("logprobs", ())]
    assert "".join(each["token"] for each in scored) == "hello world"
    assert all(len(each["top_logprobs"]) == 2 and each["logprob"] < 0 for each in scored)
    assert post(served, "generate", prompt="hi", stream=False, **fields).json()["logprobs"]


def test_an_error_in_a_stream_is_its_last_line(server: Server) -> None:
    engine = server.join("hello world", skip_token=True)
    engine.behaviour.hold_tokens_after = None
    answer = post(server, "chat", messages=HI)
    if answer.status_code == 200:
        assert list(json.loads(answer.text.splitlines()[-1])) == ["error"]
    else:
        refused(answer, answer.status_code)


def test_options_become_sampling_parameters(served: Server) -> None:
    same: dict[str, Any] = {"seed": 7, "temperature": 0.5, "top_k": 20.0, "top_p": 0.9}
    same |= {"min_p": 0.1, "presence_penalty": 0.5, "frequency_penalty": 0.25}
    others = {"repeat_penalty": 1.5, "num_predict": 30.0}
    without_effect = {"num_gpu": 1, "num_thread": 8, "typical_p": 0.7, "unknown": []}
    submit = last_submit(served, "chat", messages=HI, options={**same, **others, **without_effect})
    expected = {**same, "repetition_penalty": 1.5, "repetition_context_size": 64}
    assert (submit.sampling, submit.max_tokens) == (SamplingParams(**expected), 30)
    body = post(served, "generate", prompt="hi", stream=False, options={"num_predict": 2}).json()
    assert body["done_reason"] == "length" and body["eval_count"] == 2


@pytest.mark.parametrize(
    ("last_n", "penalty", "size"), [(0, 1.0, None), (-1, 1.5, 2**31 - 1), (10, 1.5, 10)]
)
def test_repeat_last_n_bounds_what_is_penalized(
    served: Server, last_n: int, penalty: float, size: int | None
) -> None:
    options = {"repeat_penalty": 1.5, "repeat_last_n": last_n}
    sampling = last_submit(served, "chat", messages=HI, options=options).sampling
    assert sampling.repetition_penalty == penalty
    assert size in (None, sampling.repetition_context_size)


@pytest.mark.parametrize("most", [None, -1, 0, -2, 10**6])
def test_num_predict_the_context_and_the_server_limit_an_answer(served: Server, most: Any) -> None:
    submit = last_submit(served, "chat", messages=HI, options={"num_predict": most})
    assert submit.max_tokens == 2000 - len(submit.token_ids)


def test_num_ctx_bounds_prompt_and_answer_together(served: Server) -> None:
    submit = last_submit(served, "chat", messages=HI, options={"num_ctx": 200})
    assert submit.max_tokens == 200 - len(submit.token_ids)
    error = refused(post(served, "generate", prompt="x" * 300, options={"num_ctx": 100}))
    assert "in the 100" in error
    turns = [
        {"role": role, "content": f"{role}{n} " + "x" * 40}
        for n in range(5)
        for role in ("user", "assistant")
    ]
    last = {"role": "user", "content": "last"}
    conversation = [{"role": "system", "content": "SYSTEM"}, *turns, last]
    given: dict[str, Any] = {"messages": conversation, "options": {"num_ctx": 250}}
    assert len(last_submit(served, "chat", **given).token_ids) < 250
    prompt = served.engine.last_prompt
    assert "SYSTEM" in prompt and "last" in prompt and "user0" not in prompt
    assert "in the 250" in refused(post(served, "chat", truncate=False, **given))


def test_a_format_becomes_a_grammar(served: Server) -> None:
    for given, wanted in (("json", {"type": "object"}), (SCHEMA, SCHEMA)):
        for path, fields in (*CHATS_AND_PROMPTS, ("generate", {"prompt": "hi", "raw": True})):
            grammar = last_submit(served, path, format=given, **fields).grammar
            assert grammar is not None and grammar.kind == "json_schema"
            assert json.loads(grammar.source) == wanted
    assert last_submit(served, "chat", messages=HI, format="").grammar is None
    assert "'format'" in refused(post(served, "chat", messages=HI, format="yaml"))


def test_a_prompt_is_put_into_the_template_unless_it_is_raw(served: Server) -> None:
    body = post(served, "generate", prompt="hi", system="be kind", stream=False).json()
    assert body["response"] == "hello world"
    templated = f"{START}system\nbe kind{END}\n{START}user\nhi{END}\n{START}assistant\n"
    assert served.engine.last_prompt == templated
    raw = post(served, "generate", prompt="hi", raw=True, stream=False).json()
    assert served.engine.last_prompt == "hi" and "context" not in raw
    for fields in ({"system": "x"}, {"context": [1]}):
        assert "'raw'" in refused(post(served, "generate", prompt="hi", raw=True, **fields))


def test_a_context_or_a_last_message_of_the_assistant_is_continued(served: Server) -> None:
    engine = served.engine
    context = lines(post(served, "generate", prompt="hi"))[-1]["context"]
    (submit,) = engine.got(Submit)
    assert context == [*submit.token_ids, *engine.behaviour.script(submit)]
    tokens = last_submit(served, "generate", prompt="and?", context=context).token_ids
    assert tokens[: len(context)] == context
    assert "and?" in engine.tokenizer.decode(tokens[len(context) :])
    assert "'context'" in refused(post(served, "generate", prompt="hi", context=[10**6]))
    ok(post(served, "chat", messages=[*HI, {"role": "assistant", "content": "It"}]))
    assert engine.last_prompt.endswith(f"{START}assistant\nIt")


def test_an_empty_request_loads_the_model(served: Server) -> None:
    for path, fields in (("chat", {"messages": HI[:0]}), ("chat", {}), ("generate", {})):
        body = post(served, path, **fields).json()
        assert body["done"] and body["done_reason"] == "load" and not body.keys() & FIGURES
    assert not served.engine.got(Submit)
    assert "not found" in refused(post(served, "chat", model="nobody"), 404)
    assert "--ollama-manage" in refused(post(served, "chat", keep_alive=0), 403)
    assert post(served, "chat", messages=HI, keep_alive=0).status_code == 200, "it is ignored"


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        ("chat", {"messages": "hi"}, "'messages'"),
        ("chat", {"messages": [{"role": "robot", "content": "x"}]}, "'messages[0].role'"),
        ("chat", {"messages": [{**HI[0], "images": ["aGk="]}]}, "'messages[0].images[0]'"),
        ("chat", {"messages": HI, "options": {"temperature": 3}}, "'options.temperature'"),
        ("chat", {"messages": HI, "options": {"num_ctx": -1}}, "'options.num_ctx'"),
        ("chat", {"messages": HI, "options": {"stop": ["x"] * 17}}, "'options.stop'"),
        ("chat", {"messages": HI, "options": {"num_predict": "9"}}, "'options.num_predict'"),
        ("chat", {"messages": HI, "keep_alive": "5 parsecs"}, "'keep_alive'"),
        ("chat", {"messages": HI, "keep_alive": "1e999"}, "'keep_alive'"),
        ("chat", {"messages": HI, "tools": [ADD, ADD]}, "'add'"),
        ("chat", {"messages": HI, "stream": "yes"}, "'stream'"),
        ("generate", {"prompt": "hi", "suffix": "x"}, "'suffix'"),
        ("generate", {"prompt": "hi", "template": "{{ .Prompt }}"}, "'template'"),
        ("generate", {"prompt": "hi", "images": ["aGk="]}, "'images[0]'"),
        ("generate", {"prompt": ["hi"]}, "'prompt'"),
        ("show", {"model": ""}, "'model'"),
    ],
)
def test_what_is_wrong_is_named(served: Server, path: str, fields: Any, named: str) -> None:
    assert named in refused(post(served, path, **fields))


def test_curl_needs_no_media_type_and_a_page_of_another_site_does(served: Server) -> None:
    body = json.dumps({"model": "tiny", "messages": HI, "stream": False})
    form = {"content-type": "application/x-www-form-urlencoded"}
    assert served.client.post("/api/chat", content=body, headers=form).status_code == 200
    elsewhere = {**form, "origin": "https://example.com"}
    refused(served.client.post("/api/chat", content=body, headers=elsewhere), 415)
    assert served.client.post("/v1/messages", content=body, headers=form).status_code == 415


def test_models_are_listed_with_what_is_known_of_them(
    start_server: StartServer, model_dir: Path, tmp_path: Path
) -> None:
    shutil.copytree(model_dir, tmp_path, dirs_exist_ok=True)
    config: dict[str, Any] = {"model_type": "qwen3", "num_hidden_layers": 36, "rms_norm_eps": 1e-6}
    config |= {"hidden_size": 64, "quantization": {"bits": 4, "group_size": 64}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    server = start_server()
    stats = EngineStats(active_memory_bytes=12345)
    server.join(directory=tmp_path, aliases=["small:4b"], stats=stats)
    listed = server.client.get("/api/tags").json()["models"]
    assert [each["name"] for each in listed] == ["tiny:latest", "small:4b"]
    details: dict[str, Any] = {"parent_model": "", "format": "safetensors", "parameter_size": ""}
    details |= {"family": "qwen3", "families": ["qwen3"], "quantization_level": "4-bit"}
    assert all(each["details"] == details and len(each["digest"]) == 64 for each in listed)
    assert listed[0]["capabilities"] == ["completion", "decision", "tools", "thinking"]
    info: dict[str, float] = {"context_length": 512, "vocab_size": 265, "block_count": 36}
    info |= {"embedding_length": 64, "attention.layer_norm_rms_epsilon": 1e-6}
    for fields in ({"model": "tiny"}, {"model": "tiny:latest"}, {"name": "small:4b"}):
        shown = server.client.post("/api/show", json=fields).json()
        assert shown["details"] == details
        architecture = {"general.architecture": "qwen3", "general.basename": "tiny"}
        assert shown["model_info"] == architecture | {f"qwen3.{k}": v for k, v in info.items()}
        assert "<|im_start|>" in shown["template"] and "FROM tiny" in shown["modelfile"]
    refused(post(server, "show", model="nobody"), 404)
    (running,) = server.client.get("/api/ps").json()["models"]
    assert (running["size"], running["context_length"]) == (12345, 512)
    assert running["expires_at"].startswith("9999")
    version = server.client.get("/version").json()["version"]
    told = server.client.get("/api/version").json()
    assert told["server_version"] == version
    assert tuple(map(int, told["version"].split("."))) >= (0, 6, 4), "VS Code needs it"


def test_keys_limits_and_metrics_hold_here_too(start_server: StartServer, tmp_path: Path) -> None:
    keys = key_flag(tmp_path, "sesame name=some models=other", "open name=all rpm=1")
    server = start_server(keys)
    server.start_engine("ok")
    server.client.headers.update(bearer("open"))
    server.wait_ready()
    some, ask = bearer("sesame"), {"model": "tiny", "messages": HI}
    refused(httpx.post(f"{server.url}/api/chat", json=ask), 401)
    for path in ("chat", "show"):
        refused(httpx.post(f"{server.url}/api/{path}", json=ask, headers=some), 403)
    for path in ("tags", "ps"):
        assert httpx.get(f"{server.url}/api/{path}", headers=some).json() == {"models": []}
    ok(server.post("/api/chat", **ask))
    answer = server.post("/api/chat", **ask)
    refused(answer, 429)
    assert int(answer.headers["retry-after"]) >= 1
    for status in (200, 429):
        assert f'path="/api/chat",status="{status}"}} 1' in server.metrics


def test_what_is_not_served_is_refused_in_this_shape(server: Server) -> None:
    for path in ("create", "copy", "push", "blobs/sha256:0"):
        error = refused(server.client.post(f"/api/{path}", json={"model": "tiny"}), 501)
        assert "not supported" in error, path
    refused(server.client.get("/api/nothing"), 404)
    refused(server.client.get("/api/chat"), 405)
    refused(server.client.post("/api/chat", content=b"{"), 400)


def test_without_a_page_the_start_says_it_runs(start_server: StartServer, server: Server) -> None:
    plain = start_server("--no-page", "--api-key=sesame")
    assert plain.client.get("/").text == "Ollama is running"
    for each in (plain, server):
        assert each.client.head("/").status_code == 200
    assert server.client.get("/").text.startswith("<!doctype html>")
    assert server.client.head("/api/version").status_code == 200


@pytest.mark.parametrize(
    ("flags", "allowed"),
    [((), None), (("--admin-key=boss",), "boss"), (("--ollama-manage",), "sesame")],
)
def test_models_are_managed_only_where_that_is_allowed(
    start_server: StartServer, flags: tuple[str, ...], allowed: str | None
) -> None:
    server = start_server("--api-key=sesame", *flags)
    body = {"model": "owner/model", "stream": False}
    # A router alone has nobody who could do it.
    for method, path, done in (("POST", "pull", 501), ("DELETE", "delete", 404)):
        for key, status in (("sesame", 403), ("boss", 401)):
            url = f"{server.url}/api/{path}"
            answer = httpx.request(method, url, json=body, headers=bearer(key))
            refused(answer, done if key == allowed else status)
