"""`/tokenize` and `/detokenize`, and the paths that are not served."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer

from shared.wire import Submit
from tests.router.conftest import Server, error_of, ok
from tests.router.scripted_engine import VOCAB, ScriptedEngine
from tests.router.tiny_tokenizer import BOS, CONTEXT

MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture(autouse=True)
def model(engine: ScriptedEngine) -> ScriptedEngine:
    return engine


def post(server: Server, path: str, **body: Any) -> dict[str, Any]:
    answer = ok(server.client.post(path, json=body))
    found: dict[str, Any] = answer.json()
    return found


def refused(server: Server, path: str, status: int = 400, **body: Any) -> dict[str, Any]:
    return error_of(server.client.post(path, json=body), status)


def test_a_text_is_tokenized(server: Server, tokenizer: Tokenizer) -> None:
    answer = post(server, "/tokenize", prompt="hello world", return_token_strs=True)
    encoded = tokenizer.encode("hello world")
    assert answer["tokens"] == encoded.ids
    assert answer["token_strs"] == encoded.tokens
    assert answer["count"] == len(encoded.ids)
    assert answer["max_model_len"] == CONTEXT


def test_token_strings_are_returned_only_on_request(server: Server) -> None:
    assert post(server, "/tokenize", prompt="hello")["token_strs"] is None


def test_a_conversation_has_the_tokens_that_a_chat_submits(
    server: Server, engine: ScriptedEngine
) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    tokens = post(server, "/tokenize", messages=MESSAGES, tools=tools)["tokens"]
    assert server.chat("hello", tools=tools).status_code == 200
    submitted = engine.got(Submit)[-1]
    assert isinstance(submitted, Submit)
    assert list(submitted.token_ids) == tokens


def test_a_conversation_may_end_without_the_models_turn(server: Server) -> None:
    whole = post(server, "/tokenize", messages=MESSAGES)["tokens"]
    open_end = post(server, "/tokenize", messages=MESSAGES, add_generation_prompt=False)["tokens"]
    assert whole[: len(open_end)] == open_end
    assert post(server, "/detokenize", tokens=whole[len(open_end) :])["prompt"] == "<|assistant|>"


def test_a_conversation_may_end_within_its_last_message(server: Server) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "one, two"}]
    tokens = post(server, "/tokenize", messages=messages, continue_final_message=True)["tokens"]
    assert post(server, "/detokenize", tokens=tokens)["prompt"].endswith("<|assistant|>one, two")


def test_the_template_gets_its_arguments(server: Server) -> None:
    tokens = post(server, "/tokenize", messages=MESSAGES, chat_template_kwargs={"extra": "more"})[
        "tokens"
    ]
    assert post(server, "/detokenize", tokens=tokens)["prompt"].endswith("<|assistant|>more")


@pytest.mark.parametrize(
    "text", ["", "hello", "zwei  Wörter\n", "👩‍👩‍👧 e\u0301", "<s>x</s>", "\x00"]
)
def test_detokenizing_restores_the_text(server: Server, text: str) -> None:
    tokens = post(server, "/tokenize", prompt=text, add_special_tokens=False)["tokens"]
    assert post(server, "/detokenize", tokens=tokens) == {"prompt": text}


def test_an_error_names_the_field(server: Server) -> None:
    assert refused(server, "/tokenize")["param"] == "prompt"
    assert refused(server, "/tokenize", prompt="x", messages=MESSAGES)["param"] == "prompt"
    assert refused(server, "/tokenize", messages=[])["param"] == "messages"
    assert refused(server, "/tokenize", prompt=5)["param"] == "prompt"
    assert refused(server, "/tokenize", prompt="x", chat_template="{{ 1 }}")["param"] == (
        "chat_template"
    )
    assert refused(server, "/detokenize")["param"] == "tokens"
    assert refused(server, "/detokenize", tokens=[1, VOCAB])["param"] == "tokens[1]"
    assert refused(server, "/detokenize", tokens=[-1])["param"] == "tokens[0]"
    for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [BOS]})):
        assert refused(server, path, 404, model="unknown", **body)["code"] == "model_not_found"


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
@pytest.mark.parametrize(
    "path", ["/v1/images", "/v1/audio/speech", "/v1/files", "/v1/files/f-1/content", "/classify"]
)
def test_an_unsupported_endpoint_is_a_501(server: Server, path: str, method: str) -> None:
    answer = server.client.request(method, path, json={} if method == "POST" else None)
    assert error_of(answer, 501)["code"] == "not_served"
    assert answer.headers["x-should-retry"] == "false"


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/responses/input_tokens"),
        ("POST", "/v1/responses/compact"),
        ("GET", "/v1/chat/completions/chatcmpl-1"),
        ("POST", "/v1/messages/batches"),
        ("GET", "/v1/messages/batches/b-1/results"),
    ],
)
def test_an_unsupported_endpoint_below_a_served_one_is_a_501(
    server: Server, method: str, path: str
) -> None:
    answer = server.client.request(method, path, json={} if method == "POST" else None)
    assert answer.status_code == 501
    assert "not supported" in answer.json()["error"]["message"]


def test_an_unknown_path_is_a_404(server: Server) -> None:
    for path in ("/v1/nothing", "/v1/embeddingsx", "/embeddings", "/v1/chat/completions/"):
        assert server.client.get(path).status_code == 404
