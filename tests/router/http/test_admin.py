"""`/admin`: who may, and what it does to engines and requests."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from shared.wire import ClearCache, Drain, Submit
from tests.router.conftest import (
    Background,
    Server,
    StartServer,
    bearer,
    error_of,
    eventually,
    ok,
    text_of,
)

ADMIN = bearer("boss")


def assert_error(answer: httpx.Response, status: int, code: str | None = None) -> dict[str, Any]:
    """Check an error answer, and return its error object."""
    error = error_of(answer, status)
    assert error["message"] and (code is None or error["code"] == code)
    return error


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text("sesame name=user\n")
    return path


@pytest.fixture(scope="module")
def server(start_server: StartServer, key_file: Path) -> Server:
    server = start_server("--admin-key=boss", f"--api-key-file={key_file}", "--restart-wait-s=20")
    server.client.headers["authorization"] = "Bearer sesame"
    return server


def admin(server: Server, method: str, path: str, **params: Any) -> Any:
    answer = ok(server.client.request(method, f"/admin/{path}", params=params, headers=ADMIN))
    return answer.json()


def test_only_the_admin_key_administrates(server: Server) -> None:
    def ask(path: str, **headers: str) -> httpx.Response:
        return httpx.get(server.url + path, headers=headers)

    path = "/admin/engines"
    assert ask(path, **ADMIN).status_code == 200
    assert ask(path, **{"x-api-key": "boss"}).status_code == 200
    assert_error(ask(path), 401)
    assert_error(ask(path, authorization="Bearer wrong"), 401)
    assert_error(ask(path, authorization="Bearer sesame"), 403, "admin_key_needed")
    assert_error(ask("/admin/nothing", **ADMIN), 404)
    assert_error(ask("/admin/restart", **ADMIN), 405)
    assert_error(ask("/v1/models", **ADMIN), 401)  # and does nothing else


def test_without_an_admin_key_there_is_nothing(start_server: StartServer, server: Server) -> None:
    closed = start_server()
    for given in ({}, ADMIN):
        assert_error(httpx.get(f"{closed.url}/admin/engines", headers=given), 404)
    assert "/admin" not in closed.client.get("/openapi.json").text
    assert "/admin/engines" in server.client.get("/openapi.json").text


def test_a_drained_engine_finishes_its_requests_and_gets_no_others(
    server: Server, background: Background
) -> None:
    first = server.join("hello world", hold_tokens_after=1, name="first")
    running = background(server.chat, "x")
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


def test_requests_are_listed_and_cancelled(server: Server, background: Background) -> None:
    engine = server.start_engine("hello world", hold_tokens_after=1, name="slow")
    eventually(lambda: ready(server) == ["slow"])
    answers = [background(server.chat, "x", stream=stream) for stream in (True, False)]
    eventually(lambda: len(engine.running) == 2)
    found = admin(server, "GET", "requests")
    assert found["total"] == 2
    assert {each["key"] for each in found["requests"]} == {"user"}
    assert len(admin(server, "GET", "requests", limit=1)["requests"]) == 1
    for each in found["requests"]:
        assert admin(server, "POST", f"requests/{each['id']}/cancel")["count"] == 1
    assert '"code":"cancelled"' in answers[0].result(60).text
    assert_error(answers[1].result(60), 503, "cancelled")
    eventually(lambda: not engine.running)
    assert admin(server, "GET", "requests")["total"] == 0
    unknown = server.client.post("/admin/requests/nothing/cancel", headers=ADMIN)
    assert_error(unknown, 404, "request_not_found")


def test_requests_say_how_much_of_the_prompt_is_computed(
    server: Server, background: Background
) -> None:
    engine = server.start_engine("hello world", hold_tokens_after=0, name="long")
    eventually(lambda: ready(server) == ["long"])

    def progress() -> tuple[int | None, int]:
        (found,) = admin(server, "GET", "requests")["requests"]
        return found["computed_prompt_tokens"], found["prompt_tokens"]

    answer = background(server.chat, "a rather long question " * 8)
    eventually(lambda: bool(engine.running))
    assert progress()[0] is None  # an engine that does not say
    tokens = progress()[1]
    for told, shown in ((3, 3), (7, 7), (-1, 0), (10**9, tokens - 1)):
        engine.behaviour.computed_prompt_tokens = told
        eventually(lambda shown=shown: progress() == (shown, tokens))  # type: ignore[misc]
    engine.behaviour.computed_prompt_tokens = 3
    eventually(lambda: progress()[0] == 3)
    engine.behaviour.hold_tokens_after = 1
    eventually(lambda: engine.sent_counts == [1])
    engine.behaviour.computed_prompt_tokens = tokens
    eventually(lambda: progress() == (tokens, tokens))
    engine.behaviour.computed_prompt_tokens = 5  # it was preempted, and computes it again
    eventually(lambda: progress() == (5, tokens))
    engine.behaviour.hold_tokens_after = None
    assert answer.result(60).status_code == 200


def test_caches_keys_and_the_log_level(server: Server, key_file: Path) -> None:
    engine = server.start_engine("hello", name="cached")
    eventually(lambda: "cached" in ready(server))
    assert "cached" in admin(server, "POST", "cache/clear", tier="ram")["names"]
    eventually(lambda: engine.got(ClearCache) == [ClearCache(ssd=False)])
    admin(server, "POST", "cache/clear")
    eventually(lambda: len(engine.got(ClearCache)) == 2 and engine.got(ClearCache)[1].ssd)
    key_file.write_text("sesame name=user\nsecond\n")
    assert admin(server, "POST", "keys/reload")["count"] == 2
    key_file.write_text("sesame\nsesame\n")
    answer = server.client.post("/admin/keys/reload", headers=ADMIN)
    assert "sesame" not in assert_error(answer, 400, "bad_keys")["message"]
    key_file.write_text("sesame name=user\n")
    admin(server, "POST", "keys/reload")
    admin(server, "POST", "log-level", level="warning")
    before = server.log.read_text()
    server.client.get("/v1/models")
    assert server.log.read_text() == before
    admin(server, "POST", "log-level", level="info")
    answer = server.client.post("/admin/log-level?level=loud", headers=ADMIN)
    assert assert_error(answer, 400)["param"] == "level"


def test_answers_are_as_described(server: Server) -> None:
    server.start_engine("hello", name="any")
    eventually(lambda: "any" in ready(server))
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


def test_a_drained_server_answers_what_runs_and_nothing_else(
    start_server: StartServer, background: Background
) -> None:
    server = start_server("--admin-key=boss")
    engine = server.join("hello world", hold_tokens_after=1)
    running = background(server.chat, "x")
    eventually(lambda: 1 in engine.sent_counts)
    assert admin(server, "POST", "drain")["count"] == 1
    assert_error(server.chat("y"), 503, "shutting_down")
    assert server.client.get("/readyz").status_code == 503
    engine.behaviour.hold_tokens_after = None
    assert running.result(60).status_code == 200
