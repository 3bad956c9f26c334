"""Speculation through all processes: the same text, its figures, and an engine that is killed."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.server import (
    CHECKED,
    RESUMED,
    Server,
    at_once,
    content_of,
    llama_server,
    serving,
    text_of,
)
from tests.mtp_checkpoints import add_likely_head
from tests.oracle import Oracle

TOKENS = 200
SAMPLED = {"temperature": 1.0, "seed": 11, "repetition_penalty": 1.1}
ASKED: list[tuple[str, dict[str, Any]]] = [("abc", {}), ("of the of the", SAMPLED), ("to be", {})]


server = llama_server("--spec-decode", "ngram", "--no-spec-decode-dynamic", **CHECKED)


@pytest.fixture(scope="module")
def drafting(tiny_model: Callable[..., Path]) -> Iterator[Server]:
    """A server whose model is its own draft model."""
    path = tiny_model("llama")
    flags = f"--spec-decode draft --draft-model-path {path} --no-spec-decode-dynamic".split()
    with serving(path, *flags, _MLX_LM_SERVER_CHECK_INTEGRITY="1") as running:
        yield running


@pytest.fixture(scope="module")
def guessing(
    tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A server whose model has a head for later tokens."""
    path = shutil.copytree(tiny_model("mimo"), tmp_path_factory.mktemp("head") / "model")
    add_likely_head("mimo", path)
    flags = "--spec-decode auto --no-spec-decode-dynamic --no-ssd".split()
    with serving(path, *flags, _MLX_LM_SERVER_CHECK_INTEGRITY="1") as running:
        yield running


def stream(server: Server, prompt: str, fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
    return server.stream(prompt, TOKENS, stream_options={"include_usage": True}, **fields)


def sources(server: Server) -> Any:
    (model,) = server.client.get("/v1/spec_decode/metrics").json()["models"]
    return model["engines"][0]["sources"]


def drafts_of_head(server: Server) -> int:
    """Return how many there were, after one more request: on a busy machine the first guesses may
    cost a request all it may lose."""
    list(stream(server, *ASKED[0]))
    return int(sources(server).get("mtp", {}).get("drafted_tokens", 0))


def test_texts_are_mlx_lms_and_usage_and_metrics_count_drafts(
    server: Server, tiny_model: Callable[..., Path]
) -> None:
    oracle = Oracle(tiny_model("llama"))
    for prompt, fields in ASKED:
        events = list(stream(server, prompt, fields))
        if not fields:
            oracle.check(oracle.tokenizer.encode(prompt), TOKENS, text_of(events))
        usage = events[-2]["usage"]
        assert usage["completion_tokens"] == TOKENS
        details = usage["completion_tokens_details"]
        assert details["accepted_prediction_tokens"] == 0  # there was no prediction
    text = content_of(server.chat("abc", 40))
    again = server.chat("abc", 40, prediction={"type": "content", "content": text})
    assert content_of(again) == text
    assert again["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 0
    server.wait_until(
        lambda: (
            {name for name, of in sources(server).items() if of["accepted_tokens"]}
            == {"ngram", "prediction"}
        ),
        30,
        "a heartbeat after the last step",
    )
    spent_s = sources(server)["ngram"]["spent_s"]
    assert spent_s, "six drafts of the other may take less than it can show"
    assert server.metric("mlx_lm_server_accepted_draft_tokens_total") > 0
    (engine,) = server.client.get("/v1/spec_decode/metrics").json()["models"][0]["engines"]
    assert engine["step_s"] and engine["acceptance"]


@pytest.mark.parametrize("source", ["drafting", "guessing"])
def test_streams_resume_with_the_same_text_after_a_kill_in_mid_speculation(
    source: str, request: pytest.FixtureRequest
) -> None:
    server: Server = request.getfixturevalue(source)
    whole = at_once(lambda asked: list(stream(server, *asked)), ASKED)
    running = [stream(server, *asked) for asked in ASKED]
    begun = [[next(events) for _ in range(3)] for events in running]
    resumed = server.metric(RESUMED)
    server.kill("engine")
    rest = at_once(list, running)
    assert server.metric(RESUMED) > resumed
    for before, first, later in zip(whole, begun, rest, strict=True):
        assert text_of(first + later) == text_of(before)
    if source == "guessing":
        server.wait_until(lambda: drafts_of_head(server) > 0, 30, "drafts of the head")
