"""The backend of LocalAI, beside the HTTP API of the same server."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from services.localai.messages import Message, ModelOptions, PredictOptions
from tests.e2e.requests.localai_client import PATIENCE_S, LocalAi, localai
from tests.e2e.server import Server, llama_server, wait_ended

TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {"at": {"enum": ["here", "there"]}},
            "required": ["at"],
            "additionalProperties": False,
        },
    },
}
SCHEMA = {"enum": ["yes", "no"], "type": "string"}


server = llama_server("--api-key", "sk-1")


@pytest.fixture(scope="module")
def backend(server: Server) -> Iterator[LocalAi]:
    with localai("--url", server.url, token="secret", MLX_LM_SERVER_API_KEY="sk-1") as running:
        loaded = running.call("LoadModel", ModelOptions(Model="any", Options=["xtc_threshold:0.1"]))
        assert loaded.success, loaded.message
        yield running


def chat(text: str, **fields: Any) -> Any:
    messages = [Message(role="user", content=text)]
    return PredictOptions(UseTokenizerTemplate=True, Messages=messages, **fields)


def whole(replies: Any) -> tuple[str, str, list[tuple[str, str]], Any]:
    """Return content, reasoning, calls and the last reply of a stream."""
    content, reasoning, calls, last = "", "", dict[int, list[str]](), None
    for last in replies:
        for delta in last.chat_deltas:
            content += delta.content
            reasoning += delta.reasoning_content
            for call in delta.tool_calls:
                name_and_arguments = calls.setdefault(call.index, ["", ""])
                name_and_arguments[0] += call.name
                name_and_arguments[1] += call.arguments
    return content, reasoning, [(name, text) for name, text in calls.values()], last


FORM = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
SAMPLED = {"Temperature": 0.7, "TopP": 0.9, "TopK": 50, "MinP": 0.01, "Seed": 5}
OF_SAMPLED = {"temperature": 0.7, "top_p": 0.9, "top_k": 50, "min_p": 0.01, "seed": 5}
ENDLESS, OF_ENDLESS = {"IgnoreEOS": True}, {"ignore_eos": True}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "greedy": ({}, {}),
    "sampled": (
        SAMPLED | {"Penalty": 1.1, "Repeat": 32},
        OF_SAMPLED | {"repetition_penalty": 1.1, "repetition_context_size": 32},
    ),
    "penalties and biases": (
        ENDLESS | {"FrequencyPenalty": 0.5, "PresencePenalty": 0.3, "LogitBias": '{"70": 4}'},
        {"frequency_penalty": 0.5, "presence_penalty": 0.3, "logit_bias": {"70": 4}} | OF_ENDLESS,
    ),
    "stop": ({"StopPrompts": ["e", "t"], "IgnoreEOS": True}, {"stop": ["e", "t"]}),
    "log-probabilities": (
        {"Logprobs": 1, "TopLogprobs": 2},
        {"logprobs": True, "top_logprobs": 2},
    ),
    "thinking": (
        {"Metadata": {"enable_thinking": "true", "chat_template_kwargs": '{"a": 1}'}},
        {"enable_thinking": True, "chat_template_kwargs": {"a": 1}},
    ),
    "tools": (
        {"Tools": json.dumps([TOOL]), "ToolChoice": "required"},
        {"tools": [TOOL], "tool_choice": "required"},
    ),
    "schema": ({"Grammar": json.dumps(SCHEMA)}, {"response_format": FORM}),
}
"""What LocalAI asks for, and what does the same in a chat completion, greedy by default."""


@pytest.mark.parametrize("case", CASES)
def test_answers_are_those_of_chat_completions(server: Server, backend: LocalAi, case: str) -> None:
    options, fields = CASES[case]
    content = "Where is it?"
    answer = server.chat(content, 24, xtc_threshold=0.1, **fields)
    choice, usage = answer["choices"][0], answer["usage"]
    message = choice["message"]
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    expected = (
        message["content"] or "",
        message.get("reasoning_content") or "",
        [(call["name"], call["arguments"]) for call in calls],
    )
    once = backend.call("Predict", chat(content, Tokens=24, **options))
    *streamed, last = whole(backend.call("PredictStream", chat(content, Tokens=24, **options)))
    assert tuple(streamed) == expected == tuple(whole([once])[:3])
    assert once.message.decode() == expected[0]
    for reply in (once, last):
        counts = (usage["prompt_tokens"], usage["completion_tokens"])
        assert (reply.prompt_tokens, reply.tokens) == counts
        assert reply.timing_prompt_processing > 0
        given = choice["logprobs"]["content"] if choice["logprobs"] else None
        assert (json.loads(reply.logprobs)["content"] if reply.logprobs else None) == given


def test_prompts_that_localai_made_itself_are_completed_as_they_are(
    server: Server, backend: LocalAi
) -> None:
    answer = server.complete("abc", 12, logprobs=1, xtc_threshold=0.1)["choices"][0]
    reply = backend.call("Predict", PredictOptions(Prompt="abc", Tokens=12, Logprobs=1))
    assert reply.message.decode() == answer["text"]
    given = json.loads(reply.logprobs)["content"]
    assert [each["token"] for each in given] == answer["logprobs"]["tokens"]
    assert [each["logprob"] for each in given] == answer["logprobs"]["token_logprobs"]
    tokens = backend.call("TokenizeString", PredictOptions(Prompt="abc"))
    expected = server.post("/tokenize", prompt="abc").json()["tokens"]
    assert list(tokens.tokens) == expected and tokens.length == len(expected)
    rendered = server.post("/tokenize", messages=[{"role": "user", "content": "abc"}]).json()
    assert list(backend.call("TokenizeString", chat("abc")).tokens) == rendered["tokens"]


@pytest.mark.parametrize(
    ("message", "status", "words"),
    [
        (PredictOptions(), "INVALID_ARGUMENT", "neither Prompt"),
        (chat("x", Temperature=9), "INVALID_ARGUMENT", "temperature"),
        (chat("x", Grammar="root ::= [a-z]"), "INVALID_ARGUMENT", "GBNF"),
        (chat("x", Grammar="[" * 100_000), "INVALID_ARGUMENT", "GBNF"),
        (chat("x", Images=["aGk="]), "INVALID_ARGUMENT", "Images"),
        (chat("x", Tools="{"), "INVALID_ARGUMENT", "Tools"),
        (chat("x", LogitBias="[1]"), "INVALID_ARGUMENT", "LogitBias"),
        (chat("x", Metadata={"enable_thinking": "maybe"}), "INVALID_ARGUMENT", "enable_thinking"),
        (PredictOptions(Prompt="x" * 2**21), "INVALID_ARGUMENT", "1048576"),
        (PredictOptions(Prompt="x " * 40_000), "INVALID_ARGUMENT", "context"),
        (chat("x", ModelIdentity="other"), "NOT_FOUND", "model identity mismatch"),
    ],
)
def test_bad_input_is_a_status_that_names_it(
    backend: LocalAi, message: Any, status: str, words: str
) -> None:
    for method in ("Predict", "PredictStream"):
        name, details = backend.error(method, message)
        assert name == status and words in details, details


def test_only_callers_with_the_token_are_served(backend: LocalAi) -> None:
    stranger = LocalAi(backend.process, backend.port, "guessed")
    for method in ("Health", "LoadModel", "Predict", "PredictStream", "Free", "Status"):
        assert stranger.error(method)[0] == "UNAUTHENTICATED"
    assert backend.call("Health").message == b"OK"
    assert backend.error("Embedding")[0] == backend.error("TTS")[0] == "UNIMPLEMENTED"


def test_a_cancelled_call_frees_its_place(server: Server, backend: LocalAi) -> None:
    stream = backend.call("PredictStream", chat("x", Tokens=3000, IgnoreEOS=True, Temperature=1))
    next(stream)
    assert backend.call("Status").state == 1  # busy
    assert server.sequences_in_flight() == 1
    stream.cancel()
    server.wait_until(lambda: server.sequences_in_flight() == 0, PATIENCE_S, "it is cancelled")
    server.wait_until(lambda: backend.call("Status").state == 2, PATIENCE_S, "it is ready")
    assert backend.call("Status").memory.total > 0


def test_models_have_servers_of_their_own_whose_engines_may_die(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    asked = PredictOptions(Prompt="abc", Tokens=1500, Temperature=1, Seed=3, IgnoreEOS=True)
    model = ModelOptions(Model="tiny", ModelFile=str(tiny_model("llama")), Options=["kv_bits:16"])
    with localai() as backend:
        assert backend.call("Status").state == 0
        for method in ("Predict", "PredictStream", "TokenizeString"):
            assert backend.error(method, asked)[0] == "FAILED_PRECONDITION"
        assert not backend.call("LoadModel", ModelOptions(Model="")).success
        refused = backend.call("LoadModel", ModelOptions(Model="m", Options=["kv_bits:5"]))
        assert not refused.success and "--kv-bits" in refused.message
        missing = backend.call("LoadModel", ModelOptions(Model=str(tmp_path / "none")))
        assert not missing.success and "not a directory" in missing.message
        loaded = backend.call("LoadModel", model)
        assert loaded.success, loaded.message
        assert backend.call("Status").state == 2
        expected = backend.call("Predict", asked).message
        metrics = backend.call("GetMetrics")
        assert metrics.tokens_generated == 1500
        assert backend.call("GetMetrics") == metrics  # of an answer that has ended
        stream = backend.call("PredictStream", asked)
        received = next(stream).message
        os.kill(backend.pids("services.processes.engine")[0], signal.SIGKILL)
        assert received + b"".join(reply.message for reply in stream) == expected
        assert backend.call("Free").success
        assert backend.call("Status").state == 0 and not backend.pids("services.")
        assert backend.error("Predict", asked)[0] == "FAILED_PRECONDITION"


def test_nothing_outlives_a_backend_that_is_killed(tiny_model: Callable[..., Path]) -> None:
    with localai() as backend:
        assert backend.call("LoadModel", ModelOptions(Model=str(tiny_model("llama")))).success
        children = backend.pids("services.")
        assert len(children) == 4
        stream = backend.call("PredictStream", PredictOptions(Prompt="x", Tokens=100))
        backend.process.kill()
        with pytest.raises(grpc.RpcError):
            list(stream)
        wait_ended(children, PATIENCE_S)
