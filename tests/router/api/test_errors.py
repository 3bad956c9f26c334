"""The error table, and that the server serves the next request after each."""

from __future__ import annotations

import gzip
import json
import socket
import sys
import zlib
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from router.errors import InvalidRequest
from router.schemas.body import parse_body
from router.schemas.requests import CompletionRequest
from tests.router.conftest import Server, error_of, ok
from tests.router.scripted_engine import ScriptedEngine, make_refusal

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

JSON = {"content-type": "application/json"}


@pytest.fixture(autouse=True)
def serves_afterwards(server: Server, lasting_engine: ScriptedEngine) -> Iterator[None]:
    yield
    assert server.chat().status_code == 200


def assert_error(answer: httpx.Response, status: int, param: str | None = None) -> dict[str, Any]:
    error = error_of(answer, status)
    assert answer.headers["x-request-id"]
    assert set(error) == {"message", "type", "param", "code"} and error["param"] == param
    return error


def post(
    server: Server, body: Any, path: str = "/v1/completions", **headers: str
) -> httpx.Response:
    return server.client.post(path, content=body, headers={**JSON, **headers})


BAD: dict[str, tuple[Any, ...]] = {
    "temperature": (-0.1, 2.1, "hot", True, 1e300),
    "top_p": (-0.1, 1.5),
    "top_k": (1.5, -2),
    "min_p": (2,),
    "max_tokens": (0, -5, True, 10**30, "many"),
    "max_new_tokens": (-5, "many"),
    "n_predict": (-5, 1.5),
    "regex": (5,),
    "json_schema": (5,),
    "n": (0, 17),
    "seed": (1.5, 2**64, "x"),
    "stop": (5, ["x"] * 17),
    "stop_token_ids": ("x",),
    "ignore_eos": (1,),
    "stream": ("yes",),
    "model": (5,),
    "priority": ("high",),
    "cache_salt": (1,),
    "min_tokens": (-1,),
    "stream_options": (5,),
    "logprobs": ("5", -1, 21, 1.5),
    "top_logprobs": (3,),
    "logit_bias": (
        *([1], {"x": 5}, {"-1": 5}, {"1.5": 5}, {"7": "much"}, {"7": 101}, {"7": -100.5}),
        *({"265": 1}, {str(i): 1 for i in range(1025)}),
    ),
    "frequency_penalty": (2.5, "0.5"),
    "presence_penalty": (True, -2.1),
    "repetition_penalty": (-0.1, 1e300),
    "repetition_context_size": (-1, 2.5),
    "best_of": (2,),
    "echo": ("yes",),
    "suffix": ("x",),
    "response_format": ("json",),
    "guided_json": (5,),
    "structured_outputs": ([],),
    "xtc_probability": (1.5, "often"),
    "xtc_threshold": (0.6, -0.1),
    "prompt_logprobs": (-1, 21, True),
}
BAD_IN_CHATS: dict[str, tuple[Any, ...]] = {
    "tool_choice": ("required",),
    "audio": ({},),
    "functions": ([{}],),
    "modalities": (["text", "audio"],),
    "max_completion_tokens": (0,),
    "chat_template_kwargs": ([], {"chat_template": "{{ 1 }}"}),
    "reasoning_effort": (3,),
    "logprobs": (1,),
    "echo": (True,),
}


def fields_in(bad: dict[str, tuple[Any, ...]]) -> list[Any]:
    """Return each field with each of its values, named like `seed-x`."""
    pairs = [(field, value) for field, values in bad.items() for value in values]
    return [pytest.param(*pair, id=f"{pair[0]}-{pair[1]!r:.20}") for pair in pairs]


@pytest.mark.parametrize(("field", "value"), fields_in(BAD))
def test_a_bad_field_is_named(server: Server, field: str, value: Any) -> None:
    assert_error(server.chat(**{field: value}), 400, field)
    assert_error(server.complete(**{field: value}), 400, field)


@pytest.mark.parametrize(("field", "value"), fields_in(BAD_IN_CHATS))
def test_a_bad_field_of_a_chat_is_named(server: Server, field: str, value: Any) -> None:
    assert_error(server.chat(**{field: value}), 400, field)


@pytest.mark.parametrize(
    ("biases", "message"),
    [
        ({"bad": 5}, "Invalid key in 'logit_bias': Expected 'int', got 'str'."),
        ({"-1": 5}, "Invalid key in 'logit_bias': Expected 'int' >= 0."),
        ({"1": "bad"}, "Invalid 'logit_bias': Expected 'float', got 'str'."),
    ],
)
def test_a_bad_key_is_told_from_a_bad_value(server: Server, biases: Any, message: str) -> None:
    error = assert_error(server.chat(logit_bias=biases), 400, "logit_bias")
    assert error["message"] == message


@pytest.mark.parametrize("value", [True, -1, 21, 1.5])
def test_fields_that_do_not_fit_together_are_named(server: Server, value: Any) -> None:
    assert_error(server.chat(logprobs=True, top_logprobs=value), 400, "top_logprobs")
    assert_error(server.chat(logprobs=False, top_logprobs=2), 400, "top_logprobs")
    assert_error(server.complete(logprobs=True), 400, "logprobs")
    assert_error(server.complete(stream=True, prompt_logprobs=1), 400, "prompt_logprobs")
    assert_error(server.complete(["a"] * 20, n=16), 400, "n")


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        *((None, "messages"), ([], "messages"), ("hi", "messages")),
        ([5], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "robot", "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
    ],
)
def test_bad_messages_are_named(server: Server, messages: Any, param: str) -> None:
    assert_error(server.post("/v1/chat/completions", messages=messages), 400, param)


@pytest.mark.parametrize(
    "prompt", [None, 5, "", [], [[]], ["a", 5], ["a", [5]], [True], [-1], [265], [1.5], [["a"]], {}]
)
def test_a_bad_prompt_is_named(server: Server, prompt: Any) -> None:
    assert error_of(server.complete(prompt))["param"].startswith("prompt")


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"null", b"[]", b"5", b'"x"', b"{}x", b"\xff\xfe{}", b"[" * 10_000),
        *(b'{"messages": NaN}', b'{"messages": [], "temperature": NaN}', b'{"temperature": 1e999}'),
        b'{"messages": [{"role": "user", "content": "\xff"}]}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"x":' * 3000 + b"1" + b"}" * 3000,
    ],
)
def test_a_body_that_is_not_a_json_object_is_a_400(server: Server, body: bytes) -> None:
    answer = post(server, body, path="/v1/chat/completions")
    assert error_of(answer)["type"] == "invalid_request_error"


def test_a_prompt_over_the_context_is_refused(server: Server) -> None:
    chat, completion = server.chat("x" * 600), server.complete([7] * 512)
    for answer, param in ((completion, "prompt"), (chat, "messages")):
        assert assert_error(answer, 400, param)["code"] == "context_length_exceeded"


def test_an_unknown_model_is_not_found(server: Server) -> None:
    assert assert_error(server.chat(model="gpt-9"), 404, "model")["code"] == "model_not_found"
    assert_error(server.client.get("/v1/models/gpt-9"), 404, "model")


def test_unknown_paths_and_methods_have_the_same_shape(server: Server) -> None:
    assert_error(server.client.get("/v1/nothing"), 404)
    assert_error(server.post("/v1/images"), 501)
    answer = server.client.get("/v1/chat/completions")
    assert_error(answer, 405)
    assert answer.headers["allow"] == "POST"


@pytest.mark.parametrize(
    "headers",
    [
        {"content-type": "text/plain"},
        {"content-type": "application/x-www-form-urlencoded"},
        {"content-encoding": "br"},
    ],
)
def test_a_body_of_another_media_type_or_encoding_is_a_415(server: Server, headers: Any) -> None:
    assert_error(post(server, b"{}", **headers), 415)


def body_of(length: int) -> bytes:
    return json.dumps({"prompt": "x" * length}).encode()


def test_a_large_body_is_a_413_also_chunked(server: Server) -> None:
    large = body_of(30_000)
    chunks = (large[start : start + 1000] for start in range(0, len(large), 1000))
    for answer in (post(server, large), post(server, chunks)):
        assert_error(answer, 413)


@pytest.mark.parametrize(
    ("encoding", "compress"),
    [("gzip", gzip.compress), ("deflate", zlib.compress), ("zstd", zstd.compress)],
)
def test_a_compressed_body_is_read(server: Server, encoding: str, compress: Any) -> None:
    named, body = {"content-encoding": encoding}, compress(body_of(2))
    ok(post(server, body, **named))
    for broken in (body[:-5], b"not compressed"):
        assert_error(post(server, broken, **named), 400)
    bomb = compress(body_of(10_000_000))
    assert len(bomb) < 20_000
    assert_error(post(server, bomb, **named), 413)


def test_a_compression_that_needs_much_memory_is_refused(server: Server) -> None:
    options: dict[int, int] = {zstd.CompressionParameter.window_log: 27}
    compressor = zstd.ZstdCompressor(options=options)
    body = compressor.compress(body_of(2)) + compressor.flush()
    assert_error(post(server, body, **{"content-encoding": "zstd"}), 400)


def test_an_unknown_compression_names_the_known_ones(server: Server) -> None:
    answer = post(server, body_of(2), **{"content-encoding": "br"})
    assert_error(answer, 415)
    assert answer.headers["accept-encoding"] == "gzip, deflate, zstd"


def test_a_refusal_of_the_engine_is_a_400(server: Server, lasting_engine: ScriptedEngine) -> None:
    lasting_engine.behaviour.refuse = lambda submit: make_refusal(
        submit, reason="too_large", message="It does not fit.", param="max_tokens"
    )
    for stream in (False, True):
        error = assert_error(server.chat(stream=stream), 400, "max_tokens")
        assert error["message"] == "It does not fit."
    lasting_engine.behaviour.refuse = lambda submit: None


def test_a_clients_request_id_is_kept_if_it_is_valid(server: Server) -> None:
    for given, is_kept in (("abc-123", True), ("a b<script>", False), ("x" * 200, False)):
        answer = server.client.get("/livez", headers={"x-request-id": given})
        assert (answer.headers["x-request-id"] == given) is is_kept
    refused = post(server, b"{}", **{"x-request-id": "mine-1"})
    assert_error(refused, 400, "prompt")
    assert refused.headers["x-request-id"] == "mine-1"


def test_broken_http_closes_only_its_own_connection(server: Server) -> None:
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port), timeout=10) as connection:
        connection.sendall(b"\x00\xff rubbish\r\n\r\n")
        assert connection.recv(1000).startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize("kind", ["auto", "required"])
def test_a_tool_whose_parameters_nest_deeply_is_an_error(server: Server, kind: str) -> None:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(450):
        schema = {"type": "object", "properties": {"a": schema}}
    tools = [{"type": "function", "function": {"name": "get", "parameters": schema}}]
    assert_error(server.chat(tools=tools, tool_choice=kind), 400, "tools")


def test_no_depth_of_a_schema_beside_tools_is_an_error_of_the_server(server: Server) -> None:
    tools = [{"type": "function", "function": {"name": "get"}}]
    asked = {"messages": [{"role": "user", "content": "x"}], "tools": tools, "max_tokens": 1}
    large = json.dumps({**asked, "_": "x" * 9_000})[:-1]  # such a body is decoded on a thread
    found = set()
    for depth in range(960, 1000):
        schema = '{"not":' * depth + "{}" + "}" * depth
        answer = post(server, f'{large}, "guided_json": {schema}}}', path="/v1/chat/completions")
        found.add(answer.status_code)
    assert found <= {200, 400}


def test_the_number_of_prompts_is_checked_before_any_is_tokenized() -> None:
    def parse(prompt: list[Any]) -> CompletionRequest:
        return parse_body(json.dumps({"prompt": prompt}).encode(), CompletionRequest)

    with pytest.raises(InvalidRequest) as refused:
        parse(["x"] * 129)
    assert refused.value.param == "prompt"
    parse(["x"] * 128)
    parse([5] * 1000)
