"""Speculation through all processes: the same text, its figures, and an engine that is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.server import Server, serving, text_of
from tests.oracle import Oracle

TOKENS = 300
SAMPLED = {"temperature": 1.0, "seed": 11, "repetition_penalty": 1.1}
ASKED: list[tuple[str, dict[str, Any]]] = [("abc", {}), ("of the of the", SAMPLED), ("to be", {})]


@pytest.fixture(scope="module")
def server(tiny_model: Callable[..., Path]) -> Iterator[Server]:
    flags = "--deterministic --spec-decode ngram --no-spec-decode-dynamic".split()
    with serving(tiny_model("llama"), *flags, _MLX_LM_SERVER_CHECK_INTEGRITY="1") as running:
        yield running


@pytest.fixture(scope="module")
def drafting(tiny_model: Callable[..., Path]) -> Iterator[Server]:
    """A server whose model is its own draft model."""
    path = tiny_model("llama")
    flags = f"--spec-decode draft --draft-model-path {path} --no-spec-decode-dynamic".split()
    with serving(path, "--deterministic", *flags, _MLX_LM_SERVER_CHECK_INTEGRITY="1") as running:
        yield running


def stream(server: Server, prompt: str, fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
    return server.stream(prompt, TOKENS, stream_options={"include_usage": True}, **fields)


def test_texts_are_mlx_lms_and_usage_and_metrics_count_drafts(
    server: Server, tiny_model: Callable[..., Path]
) -> None:
    oracle = Oracle(tiny_model("llama"))
    details = []
    for prompt, fields in ASKED:
        events = list(stream(server, prompt, fields))
        if not fields:
            oracle.check(oracle.tokenizer.encode(prompt), TOKENS, text_of(events))
        usage = events[-2]["usage"]
        assert usage["completion_tokens"] == TOKENS
        details.append(usage["completion_tokens_details"])
    accepted = sum(each["accepted_prediction_tokens"] for each in details)
    rejected = sum(each["rejected_prediction_tokens"] for each in details)
    assert accepted > 0 and rejected > 0
    counted = "mlx_lm_server_accepted_draft_tokens_total"
    server.wait_until(lambda: server.metric(counted) == accepted, 30, counted)
    assert server.metric("mlx_lm_server_draft_tokens_total") == accepted + rejected
    shown = server.client.get("/v1/spec_decode/metrics").json()
    assert shown["total"]["accepted_tokens"] == accepted
    (engine,) = shown["models"][0]["engines"]
    assert engine["sources"]["ngram"]["drafted_tokens"] == accepted + rejected
    assert shown["total"] == shown["models"][0]["total"] == engine["sources"]["ngram"]
    assert engine["step_s"] and engine["acceptance"]


@pytest.mark.parametrize("source", ["server", "drafting"])
def test_streams_resume_with_the_same_text_after_a_kill_in_mid_speculation(
    source: str, request: pytest.FixtureRequest
) -> None:
    server: Server = request.getfixturevalue(source)
    with ThreadPoolExecutor(len(ASKED)) as pool:
        whole = list(pool.map(lambda asked: list(stream(server, *asked)), ASKED))
        running = [stream(server, *asked) for asked in ASKED]
        begun = [[next(events) for _ in range(3)] for events in running]
        resumed = server.metric("mlx_lm_server_resumed_requests_total")
        (pid,) = server.pids("services.engine")
        os.kill(pid, signal.SIGKILL)
        rest: list[list[dict[str, Any]]] = list(pool.map(list, running))
    assert server.metric("mlx_lm_server_resumed_requests_total") > resumed
    for before, first, later in zip(whole, begun, rest, strict=True):
        assert text_of(first + later) == text_of(before)
