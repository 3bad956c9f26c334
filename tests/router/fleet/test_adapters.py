"""Names of adapters: where they lead, who sees them, and how an administrator changes them."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from shared.wire import (
    AdapterChecked,
    AdapterDecision,
    AdapterDecisions,
    AdapterRef,
    CheckAdapter,
    Submit,
    encode,
)
from tests.router.conftest import Server, eventually
from tests.router.scripted_engine import ScriptedEngine

Start = Callable[..., ScriptedEngine]
ADMIN = {"authorization": "Bearer boss"}


def ref(name: str, digest: str = "d") -> AdapterRef:
    return AdapterRef(name=name, path=f"/adapters/{name}", digest=digest, rank=4)


def finds(asked: CheckAdapter) -> AdapterChecked:
    return AdapterChecked(name=asked.name, path=asked.path, adapter=ref(asked.name))


@pytest.fixture(scope="module")
def server(start_server: Callable[..., Server]) -> Server:
    return start_server("--restart-wait-s=3", "--admin-key=boss")


@pytest.fixture
def engine(server: Server, start_engine: Start, says: Any) -> ScriptedEngine:
    found = start_engine(
        server, script=says("hi"), adapters=[ref("polite")], max_adapters=2, check=finds
    )

    def ready() -> list[str]:
        engines = server.client.get("/admin/engines", headers=ADMIN).json()["engines"]
        return [each["incarnation"] for each in engines if each["ready"]]

    eventually(lambda: ready() == [found.incarnation])  # and that of the test before has left
    server.wait_ready()
    return found


def assert_error(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


def change(server: Server, what: str, **body: Any) -> httpx.Response:
    return server.client.post(f"/admin/adapters/{what}", json=body, headers=ADMIN)


def names(server: Server) -> list[str]:
    return [card["id"] for card in server.client.get("/v1/models").json()["data"]]


def asked_for(engine: ScriptedEngine, server: Server, name: str) -> AdapterRef | None:
    answer = server.complete(model=name)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == name
    return engine.got(Submit)[-1].adapter


def test_a_request_names_an_adapter_with_or_without_its_model(
    server: Server, engine: ScriptedEngine
) -> None:
    assert asked_for(engine, server, "polite") == ref("polite")
    assert asked_for(engine, server, "tiny:polite") == ref("polite")
    assert asked_for(engine, server, "tiny") is None
    assert_error(server.complete(model="tiny:rude"), 404)
    card = server.client.get("/v1/models/polite").json()
    assert (card["id"], card["root"], card["parent"]) == ("tiny:polite", "polite", "tiny")
    assert names(server) == ["tiny", "tiny:polite"]
    assert 'adapter_requests_total{adapter="polite",model="tiny"} 2.0' in (
        server.client.get("/metrics").text
    )


def test_ollamas_lists_have_adapters_as_tags_of_their_model(
    server: Server, engine: ScriptedEngine
) -> None:
    tags = {each["name"]: each for each in server.client.get("/api/tags").json()["models"]}
    assert tags["tiny:polite"]["details"]["parent_model"] == "tiny"
    assert tags["tiny:polite"]["digest"] != tags["tiny:latest"]["digest"]
    shown = server.client.post("/api/show", json={"model": "polite:latest"}).json()
    assert shown["modelfile"] == "FROM tiny\nADAPTER polite\n"
    answer = server.client.post(
        "/api/generate", json={"model": "polite", "prompt": "x", "stream": False}
    )
    assert answer.json()["response"] == "hi"
    assert engine.got(Submit)[-1].adapter == ref("polite")


def test_an_adapter_is_no_model_for_embeddings(server: Server, engine: ScriptedEngine) -> None:
    answer = server.client.post("/v1/embeddings", json={"model": "polite", "input": "x"})
    assert_error(answer, 400)


def test_an_administrator_loads_and_unloads_adapters(
    server: Server, engine: ScriptedEngine
) -> None:
    with ThreadPoolExecutor(2) as threads:  # two at once are one
        both = [threads.submit(change, server, "load", name="new", path="/new") for _ in "ab"]
        assert [each.result().status_code for each in both] == [200, 200]
    assert names(server).count("tiny:new") == 1
    assert asked_for(engine, server, "new") == ref("new")
    assert change(server, "unload", name="tiny:polite").json()["name"] == "polite"
    assert_error(server.complete(model="polite"), 404)
    assert_error(change(server, "unload", name="polite"), 404)
    kept = {each.name: each.adapter for each in engine.got(AdapterDecisions)[-1].decisions}
    assert kept == {"new": ref("new"), "polite": None}
    log = server.log.read_text()
    assert "done=adapter_loaded name=tiny:new" in log


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"name": "a:b", "path": "/x"}, 400, "name"),
        ({"name": "tiny", "path": "/x"}, 400, "name"),
        ({"name": "a", "path": "x"}, 400, "path"),
        ({"name": "a", "path": 5}, 400, "path"),
        ({"name": "a", "path": "/x", "model": "other"}, 404, "model"),
        ({"name": "a"}, 400, None),
        ({"name": "broken", "path": "/broken"}, 400, "path"),
    ],
)
def test_what_cannot_be_loaded_is_refused_by_name(
    server: Server, engine: ScriptedEngine, body: dict[str, Any], status: int, param: str | None
) -> None:
    engine.behaviour.check = lambda asked: AdapterChecked(
        name=asked.name, path=asked.path, error="it has no weights"
    )
    error = assert_error(change(server, "load", **body), status)
    assert param is None or error["param"] == param
    assert "tiny:a" not in names(server)


def test_engines_that_disagree_or_are_lost_load_nothing(
    server: Server, engine: ScriptedEngine, start_engine: Start, says: Any
) -> None:
    second = start_engine(server, name="second", script=says("hi"), max_adapters=2)
    second.behaviour.check = lambda asked: AdapterChecked(
        name=asked.name, path=asked.path, adapter=ref(asked.name, "another")
    )
    eventually(lambda: server.client.get("/v1/models/tiny").json()["ready_replicas"] == 2)
    error = assert_error(change(server, "load", name="both", path="/x"), 400)
    assert "different adapters" in error["message"]
    second.behaviour.check = lambda asked: None
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(change, server, "load", name="both", path="/y")
        eventually(lambda: any(each.path == "/y" for each in second.got(CheckAdapter)))
        second.leave()
        assert_error(waiting.result(), 503)
    assert "tiny:both" not in names(server)


def test_a_router_takes_over_what_engines_have_kept(
    start_server: Callable[..., Server], start_engine: Start, says: Any
) -> None:
    """As after a restart of the router, or beside another one."""
    server = start_server("--admin-key=boss")
    adapters = [ref("old"), ref("no name")]
    engine = start_engine(server, script=says("hi"), adapters=adapters, max_adapters=2)
    server.wait_ready()
    decisions = [
        AdapterDecision(name="old", version=7),
        AdapterDecision(name="new", adapter=ref("new"), version=8),
        AdapterDecision(name="no name", adapter=ref("no name"), version=9),
        AdapterDecision(name="huge", adapter=ref("huge"), version=2**63),
    ]
    engine.say(*encode(AdapterDecisions(decisions=decisions)))
    eventually(lambda: names(server) == ["tiny", "tiny:new"])
    other = start_engine(server, name="other", script=says("hi"), max_adapters=2)
    eventually(lambda: len(other.got(AdapterDecisions)) > 0)
    assert other.got(AdapterDecisions)[-1].decisions == decisions[:2]


def test_only_engines_that_take_adapters_get_requests_for_them(
    start_server: Callable[..., Server], start_engine: Start, says: Any
) -> None:
    """An engine of an older release would ignore the adapter."""
    server = start_server("--restart-wait-s=2", "--admin-key=boss")
    plain = start_engine(server, name="plain", script=says("hi"))
    adapted = start_engine(
        server,
        name="adapted",
        script=says("hi"),
        adapters=[ref("polite")],
        max_adapters=1,
        max_sequences=1,
        check=finds,
    )
    eventually(lambda: names(server) == ["tiny", "tiny:polite"])
    eventually(lambda: server.client.get("/v1/models/tiny").json()["ready_replicas"] == 2)
    assert change(server, "load", name="new", path="/new").status_code == 200
    adapted.behaviour.hold_tokens_after = 0
    with ThreadPoolExecutor(2) as threads:
        both = [threads.submit(server.complete, model=name) for name in ("polite", "new")]
        queued = 'queued_requests{model="tiny"} 1.0'
        eventually(lambda: queued in server.client.get("/metrics").text)
        assert server.complete(model="tiny").status_code == 200  # none waits behind those
        adapted.behaviour.hold_tokens_after = None
        assert [each.result().status_code for each in both] == [200, 200]
    adapted.leave()
    gone = assert_error(server.complete(model="polite"), 503)
    assert "that takes adapters" in gone["message"]
    assert "takes no adapters" in assert_error(server.complete(model="polite"), 400)["message"]
    assert [each.adapter for each in plain.got(Submit)] == [None]


def test_an_adapter_that_left_the_flags_keeps_its_name_as_long_as_a_restart_may_take(
    start_server: Callable[..., Server], start_engine: Start, says: Any
) -> None:
    server = start_server("--restart-wait-s=1", "--admin-key=boss")
    fields: dict[str, Any] = {"script": says("hi"), "max_adapters": 2}
    had = start_engine(server, name="had", adapters=[ref("old")], **fields)
    start_engine(server, name="has none", **fields)
    server.wait_ready()
    eventually(lambda: server.client.get("/v1/models/tiny").json()["ready_replicas"] == 2)
    had.leave()
    assert server.complete(model="old").status_code == 200  # the other engine can read it
    again = start_engine(server, name="had", adapters=[ref("old")], **fields)
    time.sleep(1.5)
    assert names(server) == ["tiny", "tiny:old"]
    again.leave()
    eventually(lambda: names(server) == ["tiny"], 10)
    assert_error(server.complete(model="old"), 404)


def test_a_name_of_adapters_of_two_models_has_to_say_which(
    start_server: Callable[..., Server], start_engine: Start, says: Any
) -> None:
    server = start_server()
    for model in ("tiny", "other"):
        adapters = [ref("same")]
        start_engine(
            server,
            name=model,
            model=model,
            script=says(model),
            adapters=adapters,
            max_adapters=1,
        )
    server.wait_ready()
    eventually(lambda: len(names(server)) == 4)
    error = assert_error(server.complete(model="same"), 404)
    assert "tiny:same" in error["message"] and "other:same" in error["message"]
    answer = server.complete(model="other:same")
    assert answer.json()["choices"][0]["text"] == "other"
