"""Engines of one name with other weights or settings, and names of models."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from router.fleet.engines.engine import Engine, ModelReplicas
from router.fleet.metrics.prometheus import Metrics
from router.fleet.queue.dispatch import Dispatcher
from router.fleet.sequences.remote_sequence import RemoteSequence
from router.fleet.tenants.tenant import Tenant
from shared.settings import Settings
from shared.wire import Ping, Submit
from tests.router.conftest import Server, StartServer, eventually, text_of
from tests.router.scripted_engine import make_hello, make_submit
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
        "new",
        name="b",
        directory=tmp_path,
        phase="loading",
        options=options,
        context_length=4096,
    )
    eventually(lambda: bool(second.got(Ping)))
    assert server.client.get("/v1/models/tiny").json()["ready_replicas"] == 1
    second.behaviour.phase = "ready"
    eventually(lambda: "model tiny has a new version" in server.log.read_text())
    assert text_of(server.chat("x")) == "new"
    text_of(server.chat("x", max_tokens=601))
    assert second.got(Submit)[-1].max_tokens == 600
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


def version(name: str) -> ModelReplicas:
    """Return a version with one engine, which takes one sequence."""
    hello = make_hello(name, max_sequences=1)
    found = ModelReplicas(hello, Settings())
    found.renderer = SimpleNamespace()  # type: ignore[assignment]
    found.engines.append(Engine(name.encode(), hello, name, 5.0))
    found.engines[0].phase = "ready"
    return found


def test_what_was_prepared_for_a_version_does_not_wait_for_engines_that_leave() -> None:
    old, new = version("a"), version("b")
    dispatcher = Dispatcher(Settings(), lambda *_: True, Metrics("test"), lambda *_: None)
    old.successor = new
    dispatcher.on_model_replaced(old)
    sequences = [RemoteSequence(make_submit(id), Tenant(), lambda: None) for id in "xy"]
    for sequence in sequences:  # they were prepared meanwhile
        dispatcher.admit(old.version_for(has_output=False), [sequence])
    dispatcher.tick()
    assert [one.engine for one in dispatcher.in_flight] == [old.engines[0], None]
    old.engines[0].phase = "draining"
    dispatcher.tick()
    dispatcher.place(new)  # as with each heartbeat
    assert [one.engine for one in dispatcher.in_flight] == [*old.engines, *new.engines]


def test_an_engine_may_not_take_the_name_of_another_model(server: Server) -> None:
    server.join("hi", name="a")
    thief = server.start_engine("no", name="b", model="other", aliases=["tiny"])
    eventually(lambda: bool(thief.got(Ping)))
    eventually(
        lambda: "engine b was refused: tiny already has the name tiny" in server.log.read_text()
    )
    assert text_of(server.chat("x")) == "hi"
