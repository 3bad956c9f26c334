"""Keys, origins, paths, probes, models and metrics."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from typing import Any

import pytest
from starlette.requests import Request

from router.api.body import receive_body
from router.errors import BodyTimeout
from router.http.middleware.error_responses import error_response
from shared.wire import EngineStats, StoreStats
from tests.router.conftest import Server, StartServer, bearer, error_of, eventually
from tests.router.scripted_engine import ScriptedEngine


@pytest.fixture(scope="module")
def guarded(start_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> Server:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("# comment\nfrom-file\n\nanother\n")
    return start_server(
        "--api-key=sesame",
        f"--api-key-file={keys}",
        "--metrics-key=scrape",
        "--cors-origin=https://app.example",
        "--root-path=/llm",
        "--memory-pressure-threshold=0.5",
    )


@pytest.mark.parametrize("key", ["sesame", "from-file", "another"])
def test_each_key_is_accepted(guarded: Server, key: str) -> None:
    assert guarded.client.get("/v1/models", headers=bearer(key)).status_code == 200
    assert guarded.client.get("/v1/models", headers={"x-api-key": key}).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer"},
        bearer("sesam"),
        {"authorization": "sesame"},
        bearer("# comment"),
        {"x-api-key": "x"},
    ],
)
def test_any_other_key_is_a_401(guarded: Server, headers: dict[str, str]) -> None:
    for path in ("/v1/models", "/v1/chat/completions", "/nothing"):
        answer = guarded.client.post(path, headers=headers, json={})
        assert error_of(answer, 401)["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("path", ["/metrics%0A", "/page/feed%0A", "/v1/models%0A"])
def test_a_path_with_a_line_break_needs_no_other_key_but_does_not_exist(
    guarded: Server, path: str
) -> None:
    for key in ("sesame", "scrape", "nothing"):
        error_of(guarded.client.get(path, headers=bearer(key)), 404)


def test_keys_are_never_logged(guarded: Server) -> None:
    guarded.client.get("/v1/models", headers=bearer("sesame"))
    guarded.client.get("/v1/models", headers=bearer("wrong-key"))
    log = guarded.log.read_text()
    assert "sesame" not in log
    assert "wrong-key" not in log


@pytest.mark.parametrize("path", ["/health", "/livez", "/readyz", "/version"])
def test_probes_need_no_key(guarded: Server, path: str) -> None:
    assert guarded.client.get(path).status_code in (200, 503)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8000", 200),
        ("[::1]:8000", 200),
        ("192.168.0.7", 200),
        ("localhost:8000", 200),
        ("LocalHost.", 200),
        ("router:8000", 200),
        (f"{socket.gethostname()}:80", 200),
        ("llm.example.com", 200),
        ("a.b.internal.example:8000", 200),
        ("internal.example.evil.com", 403),
        ("rebound.evil.com:8000", 403),
        ("127.0.0.1.evil.com", 403),
        ("example.com", 403),
    ],
)
def test_a_server_without_keys_answers_to_its_own_names_only(
    keyless: Server, host: str, status: int
) -> None:
    answer = keyless.client.get("/v1/models", headers={"host": host})
    assert answer.status_code == status
    if status == 403:
        assert answer.json()["error"]["code"] == "host_not_allowed"
        assert "--allowed-host" in answer.json()["error"]["message"]
    for path in ("/livez", "/version"):
        assert keyless.client.get(path, headers={"host": host}).status_code == 200
    for path in ("/health", "/readyz", "/metrics"):  # they name models
        refused = keyless.client.get(path, headers={"host": host}).status_code == 403
        assert refused == (status == 403), path


@pytest.fixture(scope="module")
def keyless(start_server: StartServer) -> Server:
    return start_server(
        "--host=0.0.0.0",
        "--allowed-host=llm.example.com",
        "--allowed-host=.internal.example",
        "--log-format=json",
    )


def test_a_server_with_keys_may_have_any_name(guarded: Server) -> None:
    headers = {"host": "evil.com", **bearer("sesame")}
    assert guarded.client.get("/v1/models", headers=headers).status_code == 200
    assert guarded.client.get("/health", headers={"host": "evil.com"}).status_code in (200, 503)


def test_a_server_without_keys_says_that_everybody_can_use_it(
    keyless: Server, guarded: Server, server: Server
) -> None:
    line = "no API key is set: everyone who can reach this machine can use the models"
    assert keyless.log.read_text().count(line) == 1
    assert line not in guarded.log.read_text() + server.log.read_text()


def log_lines(server: Server, word: str) -> list[str]:
    eventually(lambda: word in server.log.read_text())
    return [line for line in server.log.read_text().splitlines() if word in line]


def test_each_request_is_one_line_of_the_log(guarded: Server) -> None:
    guarded.join("secret reply", cached_tokens=2)
    body = {"prompt": "secret prompt", "max_tokens": 3}
    headers = {**bearer("from-file"), "x-client-request-id": "mine-1", "x-request-id": "r-1"}
    answer = guarded.client.post("/v1/completions", json=body, headers=headers).json()
    (line,) = log_lines(guarded, "r-1")
    assert " info router: POST /v1/completions 200 key=key-" in line
    usage = answer["usage"]
    for word in (
        "model=tiny",
        f"prompt_tokens={usage['prompt_tokens']}",
        "cached_tokens=2",
        "output_tokens=3",
        "queue_s=0.0",
        "first_token_s=",
        "total_s=",
        "finish=length",
        f"id={answer['id']}",
        "request_id=r-1",
        "client_id=mine-1",
    ):
        assert f" {word}" in line, word
    assert "secret" not in guarded.log.read_text()


def test_requests_that_fail_and_probes_are_told_apart_in_the_log(keyless: Server) -> None:
    keyless.join("hello world", hold_tokens_after=2)
    bad = {"model": "no", "prompt": "x"}
    keyless.client.post("/v1/completions", json=bad, headers={"x-request-id": "r-2"})
    found = json.loads(log_lines(keyless, "r-2")[0])
    assert found["message"] == "POST /v1/completions 404"
    parts = (found["method"], found["path"], found["status"])
    assert parts == ("POST", "/v1/completions", 404)
    assert (found["error"], found["level"]) == ("model_not_found", "info")
    body = {"prompt": "x", "stream": True}
    headers = {"x-request-id": "r-3"}
    with keyless.client.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
        assert any("wor" in line for line in answer.iter_lines())  # the second token has come
    found = json.loads(log_lines(keyless, "r-3")[0])
    assert found["error"] == "client_disconnected"
    assert (found["output_tokens"], found["model"]) == (2, "tiny")
    keyless.client.get("/a%0Ab info router: forged", headers={"x-request-id": "r-4"})
    found = json.loads(log_lines(keyless, "r-4")[0])
    assert found["message"] == r"GET '/a\nb info router: forged' 404"
    assert not any("/livez" in line for line in keyless.log.read_text().splitlines())


def test_metrics_have_a_key_of_their_own(guarded: Server) -> None:
    assert guarded.client.get("/metrics").status_code == 401
    assert guarded.client.get("/metrics", headers=bearer("sesame")).status_code == 401
    assert guarded.client.get("/metrics", headers=bearer("scrape")).status_code == 200


def test_a_page_has_to_say_that_it_sends_json(start_server: StartServer) -> None:
    """A body without a type is sent anywhere by a browser, which asks nobody."""
    client, body = start_server().client, b'{"prompt": "abc"}'
    page = {"origin": "https://app.example"}
    assert client.post("/v1/completions", content=body, headers=page).status_code == 415
    assert client.post("/v1/completions", content=body).status_code != 415


def test_only_the_allowed_origin_may_call(guarded: Server) -> None:
    path, granted = "/v1/chat/completions", "access-control-allow-origin"
    own = {"origin": "https://app.example"}
    ask = {"access-control-request-method": "POST", "access-control-request-headers": "x"}
    assert guarded.client.options(path, headers=own | ask).headers[granted] == own["origin"]
    other = {"origin": "https://evil.example", **ask}
    assert granted not in guarded.client.options(path, headers=other).headers
    refused = guarded.client.post(path, headers=own, json={})
    assert (refused.status_code, refused.headers[granted]) == (401, own["origin"])


def test_the_root_path_is_optional(guarded: Server) -> None:
    for path in ("/livez", "/llm/livez"):
        assert guarded.client.get(path).status_code == 200
    assert guarded.client.get("/llm/v1/models").status_code == 401
    assert guarded.client.get("/llm/v1/models", headers=bearer("sesame")).status_code == 200


def has_status(server: Server, status: str) -> Callable[[], bool]:
    return lambda: server.client.get("/health").json()["status"] == status


def test_health_follows_memory_pressure(guarded: Server) -> None:
    engine = guarded.join("hi")
    headers = bearer("sesame")
    for used, status, code in ((10, "ok", 200), (40, "degraded", 200), (50, "overloaded", 503)):
        engine.behaviour.stats = EngineStats(limit_bytes=100, unevictable_bytes=used)
        eventually(has_status(guarded, status))
        assert guarded.client.get("/health").status_code == code
    answer = guarded.client.post("/v1/completions", json={"prompt": "x"}, headers=headers)
    assert error_of(answer, 503)["code"] == "memory_pressure"
    assert int(answer.headers["retry-after"]) >= 1
    engine.behaviour.stats = EngineStats(limit_bytes=100, unevictable_bytes=0)
    eventually(has_status(guarded, "ok"))
    answer = guarded.client.post("/v1/completions", json={"prompt": "x"}, headers=headers)
    assert answer.status_code == 200


def test_models_are_listed_and_shown(server: Server, engine: ScriptedEngine) -> None:
    (model,) = server.client.get("/v1/models").json()["data"]
    assert model["id"] == "tiny"
    assert model["object"] == "model"
    assert model["context_length"] == 512
    assert model["ready_replicas"] == 1
    assert server.client.get("/v1/models/tiny").json() == model


def test_without_an_engine_the_server_is_live_but_not_ready(start_server: StartServer) -> None:
    server = start_server()
    assert server.client.get("/livez").status_code == 200
    readyz = server.client.get("/readyz")
    assert readyz.status_code == 503
    assert readyz.json()["reasons"] == ["no engine has joined yet"]
    assert server.client.get("/health").status_code == 503
    assert server.chat().status_code == 503


def test_a_loading_engine_is_not_ready(server: Server) -> None:
    engine = server.start_engine(phase="loading")
    eventually(lambda: "loading" in server.client.get("/readyz").text)
    assert server.client.get("/readyz").status_code == 503
    engine.behaviour.phase = "ready"
    server.wait_ready()


def test_metrics_have_the_names_that_dashboards_use(server: Server, engine: ScriptedEngine) -> None:
    engine.behaviour.stats = EngineStats(
        running=2,
        used_blocks=5,
        free_blocks=59,
        limit_bytes=1000,
        unevictable_bytes=300,
        prompt_tokens_total=100,
        cached_ram_tokens_total=25,
    )
    engine.behaviour.store = StoreStats(blocks=7, bytes=900, state="full", disk_errors_total=3)
    assert server.chat().status_code == 200
    label = '{engine="engine-0",model="tiny"}'
    eventually(lambda: f"used_blocks{label} 5.0" in scrape(server))
    text = scrape(server)
    for line in (
        f"active_sequences{label} 2.0",
        f"free_blocks{label} 59.0",
        f"cache_hit_rate{label} 0.25",
        f"mlx_lm_server_kv_utilization{label} 0.3",
        'queued_requests{model="tiny"} 0.0',
        "dist_fatal 0.0",
        "shutdown_clean 1.0",
        f"mlx_lm_server_cached_ram_tokens_total{label} 25.0",
        f"mlx_lm_server_store_bytes{label} 900.0",
        f"mlx_lm_server_store_disk_errors_total{label} 3.0",
        'mlx_lm_server_store_state{engine="engine-0",model="tiny",state="full"} 1.0',
        'mlx_lm_server_store_state{engine="engine-0",model="tiny",state="ok"} 0.0',
    ):
        assert line in text, line
    for name in ("time_to_first_token", "inter_token", "end_to_end", "queue_time"):
        assert f"mlx_lm_server_{name}_seconds_count" in text
    assert 'mlx_lm_server_requests_total{path="/v1/chat/completions",status="200"}' in text
    assert "mlx_lm_server_build_info{" in text


def test_paths_with_parameters_are_counted_by_template(server: Server) -> None:
    for name in ("one", "another"):
        assert server.client.get(f"/v1/models/{name}").status_code == 404
    assert server.client.get("/nothing").status_code == 404
    text = scrape(server)
    assert 'requests_total{path="/v1/models/{model}",status="404"} 2.0' in text
    assert 'requests_total{path="other",status="404"} 1.0' in text


def scrape(server: Server) -> str:
    answer = server.client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    # The order of labels means nothing to Prometheus; this test needs a fixed one.
    return answer.text.replace('{model="tiny",engine="engine-0"', '{engine="engine-0",model="tiny"')


def test_a_slow_body_is_a_408() -> None:
    async def receive() -> dict[str, Any]:
        await asyncio.sleep(60)
        raise AssertionError

    scope = {"type": "http", "method": "POST", "headers": [], "path": "/"}
    with pytest.raises(BodyTimeout) as late:
        asyncio.run(receive_body(Request(scope, receive), 100, timeout_s=0.05))
    answer = error_response(late.value, {**scope, "state": {"path": "/", "request_id": "x"}})
    assert answer.status_code == 408
    assert json.loads(bytes(answer.body))["error"]["code"] == "request_timeout"
