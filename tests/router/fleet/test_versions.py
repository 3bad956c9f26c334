"""Engines of one name with other weights or settings, and names of models."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.wire import Ping
from tests.router.conftest import Server, StartServer, eventually, text_of
from tests.router.tiny_tokenizer import write_tokenizer


@pytest.fixture
def server(start_server: StartServer) -> Server:
    return start_server("--restart-wait-s=4")


def test_a_new_version_takes_over_when_it_is_ready(server: Server, tmp_path: Path) -> None:
    """What the one before has, it finishes. Settings of an engine hold for its version."""
    write_tokenizer(tmp_path, temperature=0.3)
    first = server.join("hi", name="a", hold_tokens_after=1)
    begun = server.begin("x")
    eventually(lambda: len(first.running) == 1)
    options = {"max_generation_tokens": 600, "unknown": 1}
    second = server.start_engine(
        "new", name="b", directory=tmp_path, phase="loading", options=options
    )
    eventually(lambda: bool(second.got(Ping)))
    assert server.client.get("/v1/models/tiny").json()["ready_replicas"] == 1
    second.behaviour.phase = "ready"
    eventually(lambda: "model tiny has a new version" in server.log.read_text())
    assert text_of(server.chat("x")) == "new"
    assert server.chat("x", max_tokens=601).status_code == 400
    first.behaviour.hold_tokens_after = None
    assert text_of(begun.result(60)) == "hi"


def test_what_waits_goes_to_a_new_version_whose_tokens_mean_the_same(server: Server) -> None:
    first = server.join("hi", name="a", max_sequences=1, hold_tokens_after=0)
    begun = server.begin("x")
    eventually(lambda: len(first.running) == 1)
    waiting = server.begin("y")
    eventually(lambda: server.client.get("/health").json()["models"][0]["queued"] == 1)
    server.start_engine("new", name="b", options={"max_generation_tokens": 600})
    assert text_of(waiting.result(60)) == "new"
    first.leave()
    assert text_of(begun.result(60)) == "new", "it had no token yet"


def test_an_engine_may_not_take_the_name_of_another_model(server: Server) -> None:
    server.join("hi", name="a")
    thief = server.start_engine("no", name="b", model="other", aliases=["tiny"])
    eventually(lambda: bool(thief.got(Ping)))
    eventually(
        lambda: "engine b was refused: tiny already has the name tiny" in server.log.read_text()
    )
    assert text_of(server.chat("x")) == "hi"
