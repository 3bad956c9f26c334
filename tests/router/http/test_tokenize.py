"""`/tokenize` and `/detokenize`, and the paths that are not served."""

from __future__ import annotations

import json
import socket
import time
from typing import Any

import httpx
import pytest

from shared.wire import Submit
from tests.router.conftest import Server, StartServer, error_of, eventually, ok
from tests.router.scripted_engine import VOCAB, ScriptedEngine
from tests.router.tiny_tokenizer import BOS, CONTEXT

MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture(autouse=True)
def model(engine: ScriptedEngine) -> ScriptedEngine:
    return engine


def post(server: Server, path: str, **body: Any) -> dict[str, Any]:
    found: dict[str, Any] = ok(server.post(path, **body)).json()
    return found


def refused(server: Server, path: str, status: int = 400, **body: Any) -> dict[str, Any]:
    return error_of(server.post(path, **body), status)


def test_a_text_is_tokenized_and_token_strings_come_only_on_request(server: Server) -> None:
    encoded = server.engine.tokenizer.encode("hello world")
    for fields, strings in (({}, None), ({"return_token_strs": True}, encoded.tokens)):
        answer = post(server, "/tokenize", prompt="hello world", **fields)
        assert (answer["tokens"], answer["token_strs"]) == (encoded.ids, strings)
        assert (answer["count"], answer["max_model_len"]) == (len(encoded.ids), CONTEXT)


def test_a_conversation_has_the_tokens_that_a_chat_submits(served: Server) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    tokens = post(served, "/tokenize", messages=MESSAGES, tools=tools)["tokens"]
    ok(served.chat("hello", tools=tools))
    assert list(served.engine.got(Submit)[-1].token_ids) == tokens


def test_the_billing_line_of_claude_code_has_no_tokens(served: Server) -> None:
    line = "x-anthropic-billing-header: cc_version=2.1.330.a; cc_entrypoint=cli; cch=1;"
    kind, billed = (
        {"role": "system", "content": f"{first}Be kind."} for first in ("", f"{line}\n")
    )
    found = [post(served, "/tokenize", messages=[each, *MESSAGES]) for each in (kind, billed)]
    assert found[0] == found[1]


BEGUN = [*MESSAGES, {"role": "assistant", "content": "one, two"}]


@pytest.mark.parametrize(
    ("fields", "end"),
    [
        ({}, "<|assistant|>"),
        ({"add_generation_prompt": False}, ""),
        ({"messages": BEGUN, "continue_final_message": True}, "<|assistant|>one, two"),
        ({"chat_template_kwargs": {"extra": "more"}}, "<|assistant|>more"),
    ],
)
def test_a_conversation_is_rendered_as_asked(server: Server, fields: Any, end: str) -> None:
    tokens = post(server, "/tokenize", **{"messages": MESSAGES, **fields})["tokens"]
    assert post(server, "/detokenize", tokens=tokens) == {"prompt": f"<|user|>hello\n{end}"}


@pytest.mark.parametrize(
    "text", ["", "hello", "zwei  Wörter\n", "👩‍👩‍👧 e\u0301", "<s>x</s>", "\x00"]
)
def test_detokenizing_restores_the_text(server: Server, text: str) -> None:
    tokens = post(server, "/tokenize", prompt=text, add_special_tokens=False)["tokens"]
    assert post(server, "/detokenize", tokens=tokens) == {"prompt": text}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "x", "chat_template": "{{ 1 }}"}, "chat_template"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [1, VOCAB]}, "tokens[1]"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
    ],
)
def test_an_error_names_the_field(server: Server, path: str, body: Any, param: str) -> None:
    assert refused(server, path, **body)["param"] == param


def test_an_answer_counts_as_a_request_until_it_is_read(start_server: StartServer) -> None:
    server = start_server("--max-request-bytes=5000000")
    zero = server.join().tokenizer.encode("\x00").ids[-1]  # in JSON, six characters
    body = json.dumps({"tokens": [zero] * 1_200_000}, separators=(",", ":")).encode()
    small = [(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)]
    with (
        httpx.Client(transport=httpx.HTTPTransport(socket_options=small)) as slow,
        slow.stream("POST", f"{server.url}/detokenize", content=body),
    ):
        time.sleep(0.2)
        assert server.client.get("/health").json()["requests"] == 1
    eventually(lambda: server.client.get("/health").json()["requests"] == 0)


def test_an_unknown_model_is_not_found(server: Server) -> None:
    for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [BOS]})):
        assert refused(server, path, 404, model="unknown", **body)["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("methods", "path"),
    [
        *(("GET POST DELETE", path) for path in ("/v1/images", "/v1/audio/speech", "/classify")),
        *(("GET POST DELETE", path) for path in ("/v1/files", "/v1/files/f-1/content")),
        # below served ones
        *(("POST", f"/v1/responses/{name}") for name in ("input_tokens",)),
        ("GET", "/v1/chat/completions/chatcmpl-1"),
        ("POST", "/v1/messages/batches"),
        ("GET", "/v1/messages/batches/b-1/results"),
    ],
)
def test_an_unsupported_endpoint_is_a_501(server: Server, methods: str, path: str) -> None:
    said = "--batch-dir" if "files" in path else "not supported"
    for method in methods.split():
        answer = server.client.request(method, path, json={} if method == "POST" else None)
        error = error_of(answer, 501)
        assert said in error["message"]
        assert error.get("code") == (None if "messages" in path else "not_served")
        assert answer.headers["x-should-retry"] == "false"


def test_an_unknown_path_is_a_404(server: Server) -> None:
    for path in ("/v1/nothing", "/v1/embeddingsx", "/embeddings", "/v1/chat/completions/"):
        assert server.client.get(path).status_code == 404


@pytest.mark.parametrize(
    ("path", "body", "example"),
    [
        ("/v1/embeddings", {"input": "hello"}, "Qwen/Qwen3-Embedding-0.6B"),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}, "BAAI/bge-reranker-v2-m3"),
    ],
)
def test_an_error_names_a_model_to_load(server: Server, path: str, body: Any, example: str) -> None:
    unnamed, wrong = refused(server, path, **body), refused(server, path, **body, model="tiny")
    assert unnamed["message"].startswith("'model' is required: ") and wrong["code"] == "wrong_task"
    for error in (unnamed, wrong):
        assert error["param"] == "model"
        assert f"No such model is loaded here; load one such as {example}." in error["message"]
