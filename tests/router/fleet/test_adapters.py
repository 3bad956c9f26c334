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
from tests.router.conftest import Server, StartServer, bearer, begin, error_of, eventually, ok
from tests.router.scripted_engine import ScriptedEngine
from tests.router.scripted_engine import adapter_ref as ref

FLAGS = ("--restart-wait-s=3", "--admin-key=boss")
ADMIN = bearer("boss")


def checked(asked: CheckAdapter, **found: Any) -> AdapterChecked:
    return AdapterChecked(name=asked.name, path=asked.path, **found)


def finds(asked: CheckAdapter) -> AdapterChecked:
    return checked(asked, adapter=ref(asked.name))


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


def asked_for(server: Server, name: str) -> AdapterRef | None:
    """Return the adapter for which the engine is asked."""
    assert ok(server.complete(model=name)).json()["model"] == name
    return server.engine.got(Submit)[-1].adapter


def test_a_request_names_an_adapter_with_or_without_its_model(served: Server) -> None:
    for name, adapter in (("polite", "polite"), ("tiny:polite", "polite"), ("tiny", None)):
        assert asked_for(served, name) == (adapter and ref(adapter))
    error_of(served.complete(model="tiny:rude"), 404)
    card = served.client.get("/v1/models/polite").json()
    assert (card["id"], card["root"], card["parent"]) == ("tiny:polite", "polite", "tiny")
    assert names(served) == ["tiny", "tiny:polite"]
    assert 'adapter_requests_total{adapter="polite",model="tiny"} 2.0' in served.metrics


def test_ollamas_lists_have_adapters_as_tags_of_their_model(served: Server) -> None:
    tags = {each["name"]: each for each in served.client.get("/api/tags").json()["models"]}
    assert tags["tiny:polite"]["details"]["parent_model"] == "tiny"
    assert tags["tiny:polite"]["digest"] != tags["tiny:latest"]["digest"]
    shown = served.post("/api/show", model="polite:latest").json()
    assert shown["modelfile"] == "FROM tiny\nADAPTER polite\n"
    answer = served.post("/api/generate", model="polite", prompt="x", stream=False)
    assert answer.json()["response"] == "hi"
    assert served.engine.got(Submit)[-1].adapter == ref("polite")


def test_an_adapter_is_no_model_for_embeddings(served: Server) -> None:
    error_of(served.post("/v1/embeddings", model="polite", input="x"), 400)


def test_administrators_load_and_unload_adapters(served: Server) -> None:
    # Two at once are one.
    both = [begin(change, served, "load", name="new", path="/new") for _ in "ab"]
    assert [each.result().status_code for each in both] == [200, 200]
    assert names(served).count("tiny:new") == 1
    assert asked_for(served, "new") == ref("new")
    assert change(served, "unload", name="tiny:polite").json()["name"] == "polite"
    error_of(served.complete(model="polite"), 404)
    error_of(change(served, "unload", name="polite"), 404)
    kept = served.engine.got(AdapterDecisions)[-1].decisions
    assert {each.name: each.adapter for each in kept} == {"new": ref("new"), "polite": None}
    assert "done=adapter_loaded name=tiny:new" in served.log.read_text()


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
    served: Server, body: dict[str, Any], status: int, param: str | None
) -> None:
    served.engine.behaviour.check = lambda asked: checked(asked, error="it has no weights")
    error = error_of(change(served, "load", **body), status)
    assert param is None or error["param"] == param
    assert "tiny:a" not in names(served)


def test_engines_that_disagree_or_are_lost_load_nothing(served: Server) -> None:
    second = served.start_engine("hi", name="second", max_adapters=2)
    second.behaviour.check = lambda asked: checked(asked, adapter=ref(asked.name, "another"))
    served.wait_replicas(2)
    error = error_of(change(served, "load", name="both", path="/x"), 400)
    assert "different adapters" in error["message"]
    second.behaviour.check = lambda asked: None
    waiting = begin(change, served, "load", name="both", path="/y")
    eventually(lambda: any(each.path == "/y" for each in second.got(CheckAdapter)))
    second.leave()
    error_of(waiting.result(), 503)
    assert "tiny:both" not in names(served)


def test_a_router_takes_over_what_engines_have_kept(start_server: StartServer) -> None:
    """As after a restart of the router, or beside another one."""
    server = start_server("--admin-key=boss")
    engine = server.join("hi", adapters=[ref("old"), ref("no name")], max_adapters=2)
    new, unnamed, huge = (ref(name) for name in ("new", "no name", "huge"))
    decisions = [
        AdapterDecision(name="old", version=7),
        AdapterDecision(name="new", adapter=new, version=8),
        AdapterDecision(name="no name", adapter=unnamed, version=9),
        AdapterDecision(name="huge", adapter=huge, version=2**63),
    ]
    engine.say(*encode(AdapterDecisions(decisions=decisions)))
    eventually(lambda: names(server) == ["tiny", "tiny:new"])
    other = server.start_engine("hi", name="other", max_adapters=2)
    eventually(lambda: len(other.got(AdapterDecisions)) > 0)
    assert other.got(AdapterDecisions)[-1].decisions == decisions[:2]


def test_only_engines_that_take_adapters_get_requests_for_them(start_server: StartServer) -> None:
    """An engine of an older release would ignore the adapter."""
    server = start_server("--restart-wait-s=2", "--admin-key=boss")
    plain = server.start_engine("hi", name="plain")
    takes: dict[str, Any] = {"adapters": [ref("polite")], "max_adapters": 1, "check": finds}
    adapted = server.start_engine("hi", name="adapted", max_sequences=1, **takes)
    eventually(lambda: names(server) == ["tiny", "tiny:polite"])
    server.wait_replicas(2)
    ok(change(server, "load", name="new", path="/new"))
    adapted.behaviour.hold_tokens_after = 0
    both = [begin(server.complete, model=name) for name in ("polite", "new")]
    eventually(lambda: 'queued_requests{model="tiny"} 1.0' in server.metrics)
    ok(server.complete(model="tiny"))  # it does not wait behind those
    adapted.behaviour.hold_tokens_after = None
    assert [each.result().status_code for each in both] == [200, 200]
    adapted.leave()
    gone = error_of(server.complete(model="polite"), 503)
    assert "that takes adapters" in gone["message"]
    assert "takes no adapters" in error_of(server.complete(model="polite"), 400)["message"]
    assert [each.adapter for each in plain.got(Submit)] == [None]


def test_an_adapter_without_flag_keeps_its_name_for_a_restart(start_server: StartServer) -> None:
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
        server.join_as(model, model, name=model, adapters=[ref("same")], max_adapters=1)
    error = error_of(server.complete(model="same"), 404)
    assert "tiny:same" in error["message"] and "other:same" in error["message"]
    answer = server.complete(model="other:same")
    assert answer.json()["choices"][0]["text"] == "other"
