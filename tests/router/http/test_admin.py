"""`/admin`: who may, and what it does to engines and requests."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from shared.wire import ClearCache, Drain, Submit
from tests.router.conftest import Server, StartServer, bearer, error_of, eventually, ok, text_of
from tests.router.scripted_engine import ScriptedEngine

ADMIN = bearer("boss")


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text("sesame name=user\n")
    return path


@pytest.fixture(scope="module")
def server(start_server: StartServer, key_file: Path) -> Server:
    server = start_server("--admin-key=boss", f"--api-key-file={key_file}", "--restart-wait-s=20")
    server.client.headers.update(bearer("sesame"))
    return server


def ask(server: Server, method: str, path: str, **params: Any) -> httpx.Response:
    return server.client.request(method, f"/admin/{path}", params=params, headers=ADMIN)


def admin(server: Server, method: str, path: str, **params: Any) -> Any:
    return ok(ask(server, method, path, **params)).json()


def started(server: Server, name: str, **options: Any) -> ScriptedEngine:
    """Return a ready engine. Those of the test before have left."""
    engine = server.join("hello world", name=name, **options)
    eventually(lambda: ready(server) == [name])
    return engine


def test_only_the_admin_key_administrates(server: Server) -> None:
    def ask(path: str, **headers: str) -> httpx.Response:
        return httpx.get(server.url + path, headers=headers)

    path = "/admin/engines"
    for headers in (ADMIN, {"x-api-key": "boss"}):
        assert ask(path, **headers).status_code == 200
    error_of(ask(path), 401)
    error_of(ask(path, **bearer("wrong")), 401)
    assert error_of(ask(path, **bearer("sesame")), 403)["code"] == "admin_key_needed"
    error_of(ask("/admin/nothing", **ADMIN), 404)
    error_of(ask("/admin/restart", **ADMIN), 405)
    error_of(ask("/v1/models", **ADMIN), 401)  # and does nothing else


def test_without_an_admin_key_there_is_nothing(start_server: StartServer, server: Server) -> None:
    closed = start_server()
    for given in ({}, ADMIN):
        error_of(httpx.get(f"{closed.url}/admin/engines", headers=given), 404)
    for each, described in ((closed, False), (server, True)):
        assert ("/admin" in each.client.get("/openapi.json").text) is described


def test_a_drained_engine_finishes_its_requests_and_gets_no_others(server: Server) -> None:
    first = started(server, "first", hold_tokens_after=1)
    running = server.begin("x")
    eventually(lambda: 1 in first.sent_counts)
    second = server.start_engine("hello", name="second")
    eventually(lambda: len(ready(server)) == 2)
    assert admin(server, "POST", "engines/first/drain")["names"] == ["first"]
    for _ in range(4):
        assert text_of(server.chat("x")) == "hello"
    assert (len(first.got(Submit)), len(second.got(Submit))) == (1, 4)
    first.behaviour.hold_tokens_after = None
    assert text_of(running.result(60)) == "hello world"
    assert ready(server) == ["second"]
    admin(server, "POST", "engines/first/drain", undo="true")
    eventually(lambda: ready(server) == ["first", "second"])
    log = server.log.read_text()
    assert re.search(r"POST /admin/engines/first/drain 200 key=\(admin\) done=drained", log)


def ready(server: Server) -> list[str]:
    engines = admin(server, "GET", "engines")["engines"]
    return sorted(each["name"] for each in engines if each["ready"])


def test_a_rolling_restart_takes_one_engine_at_a_time(server: Server) -> None:
    both = ["one", "two"]
    old = {name: server.start_engine("hello", name=name) for name in both}
    eventually(lambda: ready(server) == both)  # those of the test before have left
    names = admin(server, "POST", "restart")["names"]
    assert sorted(names) == both
    for number, name in enumerate(names):
        eventually(lambda name=name: bool(old[name].got(Drain)))  # type: ignore[misc]
        waiting = names[number + 1 :]
        assert not any(old[other].got(Drain) for other in waiting)
        old[name].leave()
        assert server.chat("x").status_code == 200
        server.start_engine("hello", name=name)
    eventually(lambda: not admin(server, "GET", "engines")["restarting"])
    eventually(lambda: ready(server) == both)


def test_requests_are_listed_and_cancelled(server: Server) -> None:
    engine = started(server, "slow", hold_tokens_after=1)
    stream, whole = (server.begin("x", stream=stream) for stream in (True, False))
    eventually(lambda: len(engine.running) == 2)
    found = admin(server, "GET", "requests")
    assert found["total"] == 2
    assert {each["key"] for each in found["requests"]} == {"user"}
    assert len(admin(server, "GET", "requests", limit=1)["requests"]) == 1
    for each in found["requests"]:
        assert admin(server, "POST", f"requests/{each['id']}/cancel")["count"] == 1
    assert '"code":"cancelled"' in stream.result(60).text
    assert error_of(whole.result(60), 503)["code"] == "cancelled"
    eventually(lambda: not engine.running)
    assert admin(server, "GET", "requests")["total"] == 0
    unknown = ask(server, "POST", "requests/nothing/cancel")
    assert error_of(unknown, 404)["code"] == "request_not_found"


def test_requests_say_how_much_of_the_prompt_is_computed(server: Server) -> None:
    engine = started(server, "long", hold_tokens_after=0)

    def progress() -> tuple[int | None, int]:
        (found,) = admin(server, "GET", "requests")["requests"]
        return found["computed_prompt_tokens"], found["prompt_tokens"]

    def say(told: int, shown: int) -> None:
        engine.behaviour.computed_prompt_tokens = told
        eventually(lambda: progress() == (shown, tokens))

    answer = server.begin("a rather long question " * 8)
    eventually(lambda: bool(engine.running))
    computed, tokens = progress()
    assert computed is None  # an engine that does not say
    for told, shown in ((3, 3), (7, 7), (-1, 0), (10**9, tokens - 1), (3, 3)):
        say(told, shown)
    engine.behaviour.hold_tokens_after = 1
    eventually(lambda: engine.sent_counts == [1])
    say(tokens, tokens)
    say(5, 5)  # it was preempted, and computes it again
    engine.behaviour.hold_tokens_after = None
    ok(answer.result(60))


def test_caches_keys_and_the_log_level(server: Server, key_file: Path) -> None:
    engine = started(server, "cached")
    assert "cached" in admin(server, "POST", "cache/clear", tier="ram")["names"]
    admin(server, "POST", "cache/clear")
    eventually(lambda: [each.ssd for each in engine.got(ClearCache)] == [False, True])
    key_file.write_text("sesame name=user\nsecond\n")
    assert admin(server, "POST", "keys/reload")["count"] == 2
    key_file.write_text("sesame\nsesame\n")
    error = error_of(ask(server, "POST", "keys/reload"), 400)
    assert error["code"] == "bad_keys" and "sesame" not in error["message"]
    key_file.write_text("sesame name=user\n")
    admin(server, "POST", "keys/reload")
    admin(server, "POST", "log-level", level="warning")
    before = server.log.read_text()
    server.client.get("/v1/models")
    assert server.log.read_text() == before
    admin(server, "POST", "log-level", level="info")
    assert error_of(ask(server, "POST", "log-level", level="loud"), 400)["param"] == "level"


def test_answers_are_as_described(server: Server) -> None:
    started(server, "any")
    document = server.client.get("/openapi.json").json()
    for template, operations in document["paths"].items():
        if not template.startswith("/admin/") or template == "/admin/drain":
            continue
        for method, operation in operations.items():
            path = template.replace("{name}", "any").replace("{id}", "unknown")
            answer = server.client.request(method, path, headers=ADMIN)
            schema = operation["responses"][str(answer.status_code)]["content"]
            whole = {**schema["application/json"]["schema"], "components": document["components"]}
            jsonschema.validate(answer.json(), whole)
            assert operation["security"] == [{"bearer": []}, {"x-api-key": []}]


def test_a_drained_server_answers_what_runs_and_nothing_else(start_server: StartServer) -> None:
    server = start_server("--admin-key=boss")
    engine = server.join("hello world", hold_tokens_after=1)
    running = server.begin("x")
    eventually(lambda: 1 in engine.sent_counts)
    assert admin(server, "POST", "drain")["count"] == 1
    assert error_of(server.chat("y"), 503)["code"] == "shutting_down"
    assert server.client.get("/readyz").status_code == 503
    engine.behaviour.hold_tokens_after = None
    ok(running.result(60))
