"""Names of adapters: where they lead, who sees them, and how an administrator changes them."""

from __future__ import annotations

import time
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
from tests.router.conftest import Background, Server, StartServer, bearer, error_of, eventually, ok
from tests.router.scripted_engine import ScriptedEngine

FLAGS = ("--restart-wait-s=3", "--admin-key=boss")
ADMIN = bearer("boss")


def ref(name: str, digest: str = "d") -> AdapterRef:
    return AdapterRef(name=name, path=f"/adapters/{name}", digest=digest, rank=4)


def finds(asked: CheckAdapter) -> AdapterChecked:
    return AdapterChecked(name=asked.name, path=asked.path, adapter=ref(asked.name))


@pytest.fixture
def engine(server: Server) -> ScriptedEngine:
    found = server.start_engine("hi", adapters=[ref("polite")], max_adapters=2, check=finds)

    def ready() -> list[str]:
        engines = server.client.get("/admin/engines", headers=ADMIN).json()["engines"]
        return [each["incarnation"] for each in engines if each["ready"]]

    eventually(lambda: ready() == [found.incarnation])  # and that of the test before has left
    server.wait_ready()
    return found


def change(server: Server, what: str, **body: Any) -> httpx.Response:
    return server.client.post(f"/admin/adapters/{what}", json=body, headers=ADMIN)


def names(server: Server) -> list[str]:
    return [card["id"] for card in server.client.get("/v1/models").json()["data"]]


def asked_for(engine: ScriptedEngine, server: Server, name: str) -> AdapterRef | None:
    answer = ok(server.complete(model=name))
    assert answer.json()["model"] == name
    return engine.got(Submit)[-1].adapter


def test_a_request_names_an_adapter_with_or_without_its_model(
    server: Server, engine: ScriptedEngine
) -> None:
    assert asked_for(engine, server, "polite") == ref("polite")
    assert asked_for(engine, server, "tiny:polite") == ref("polite")
    assert asked_for(engine, server, "tiny") is None
    error_of(server.complete(model="tiny:rude"), 404)
    card = server.client.get("/v1/models/polite").json()
    assert (card["id"], card["root"], card["parent"]) == ("tiny:polite", "polite", "tiny")
    assert names(server) == ["tiny", "tiny:polite"]
    assert 'adapter_requests_total{adapter="polite",model="tiny"} 2.0' in (server.metrics)


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
    error_of(answer, 400)


def test_an_administrator_loads_and_unloads_adapters(
    server: Server, engine: ScriptedEngine, background: Background
) -> None:
    # Two at once are one.
    both = [background(change, server, "load", name="new", path="/new") for _ in "ab"]
    assert [each.result().status_code for each in both] == [200, 200]
    assert names(server).count("tiny:new") == 1
    assert asked_for(engine, server, "new") == ref("new")
    assert change(server, "unload", name="tiny:polite").json()["name"] == "polite"
    error_of(server.complete(model="polite"), 404)
    error_of(change(server, "unload", name="polite"), 404)
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
    error = error_of(change(server, "load", **body), status)
    assert param is None or error["param"] == param
    assert "tiny:a" not in names(server)


def test_engines_that_disagree_or_are_lost_load_nothing(
    server: Server, engine: ScriptedEngine, background: Background
) -> None:
    second = server.start_engine("hi", name="second", max_adapters=2)
    second.behaviour.check = lambda asked: AdapterChecked(
        name=asked.name, path=asked.path, adapter=ref(asked.name, "another")
    )
    server.wait_replicas(2)
    error = error_of(change(server, "load", name="both", path="/x"), 400)
    assert "different adapters" in error["message"]
    second.behaviour.check = lambda asked: None
    waiting = background(change, server, "load", name="both", path="/y")
    eventually(lambda: any(each.path == "/y" for each in second.got(CheckAdapter)))
    second.leave()
    error_of(waiting.result(), 503)
    assert "tiny:both" not in names(server)


def test_a_router_takes_over_what_engines_have_kept(start_server: StartServer) -> None:
    """As after a restart of the router, or beside another one."""
    server = start_server("--admin-key=boss")
    adapters = [ref("old"), ref("no name")]
    engine = server.join("hi", adapters=adapters, max_adapters=2)
    decisions = [
        AdapterDecision(name="old", version=7),
        AdapterDecision(name="new", adapter=ref("new"), version=8),
        AdapterDecision(name="no name", adapter=ref("no name"), version=9),
        AdapterDecision(name="huge", adapter=ref("huge"), version=2**63),
    ]
    engine.say(*encode(AdapterDecisions(decisions=decisions)))
    eventually(lambda: names(server) == ["tiny", "tiny:new"])
    other = server.start_engine("hi", name="other", max_adapters=2)
    eventually(lambda: len(other.got(AdapterDecisions)) > 0)
    assert other.got(AdapterDecisions)[-1].decisions == decisions[:2]


def test_only_engines_that_take_adapters_get_requests_for_them(
    start_server: StartServer, background: Background
) -> None:
    """An engine of an older release would ignore the adapter."""
    server = start_server("--restart-wait-s=2", "--admin-key=boss")
    plain = server.start_engine("hi", name="plain")
    adapted = server.start_engine(
        "hi", name="adapted", adapters=[ref("polite")], max_adapters=1, max_sequences=1, check=finds
    )
    eventually(lambda: names(server) == ["tiny", "tiny:polite"])
    server.wait_replicas(2)
    assert change(server, "load", name="new", path="/new").status_code == 200
    adapted.behaviour.hold_tokens_after = 0
    both = [background(server.complete, model=name) for name in ("polite", "new")]
    queued = 'queued_requests{model="tiny"} 1.0'
    eventually(lambda: queued in server.metrics)
    assert server.complete(model="tiny").status_code == 200  # none waits behind those
    adapted.behaviour.hold_tokens_after = None
    assert [each.result().status_code for each in both] == [200, 200]
    adapted.leave()
    gone = error_of(server.complete(model="polite"), 503)
    assert "that takes adapters" in gone["message"]
    assert "takes no adapters" in error_of(server.complete(model="polite"), 400)["message"]
    assert [each.adapter for each in plain.got(Submit)] == [None]


def test_an_adapter_that_left_the_flags_keeps_its_name_as_long_as_a_restart_may_take(
    start_server: StartServer,
) -> None:
    server = start_server("--restart-wait-s=1", "--admin-key=boss")
    had = server.start_engine("hi", name="had", adapters=[ref("old")], max_adapters=2)
    server.join("hi", name="has none", max_adapters=2)
    server.wait_replicas(2)
    had.leave()
    assert server.complete(model="old").status_code == 200  # the other engine can read it
    again = server.start_engine("hi", name="had", adapters=[ref("old")], max_adapters=2)
    time.sleep(1.5)
    assert names(server) == ["tiny", "tiny:old"]
    again.leave()
    eventually(lambda: names(server) == ["tiny"], 10)
    error_of(server.complete(model="old"), 404)


def test_a_name_of_adapters_of_two_models_has_to_say_which(start_server: StartServer) -> None:
    server = start_server()
    for model in ("tiny", "other"):
        adapters = [ref("same")]
        server.start_engine(model, name=model, model=model, adapters=adapters, max_adapters=1)
    server.wait_ready()
    eventually(lambda: len(names(server)) == 4)
    error = error_of(server.complete(model="same"), 404)
    assert "tiny:same" in error["message"] and "other:same" in error["message"]
    answer = server.complete(model="other:same")
    assert answer.json()["choices"][0]["text"] == "other"
