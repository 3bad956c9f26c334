"""Keys, origins, paths, probes, models and metrics."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from starlette.requests import Request

from router.api.body import receive_body
from router.errors import BodyTimeout
from router.fleet.body_budget import BodyBudget, BodyBytes
from router.http.middleware.error_responses import error_response
from shared.wire import EngineStats, StoreStats
from tests.router.conftest import Server, StartServer, bearer, error_of, eventually, key_flag, ok


@pytest.fixture(scope="module")
def guarded(start_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> Server:
    return start_server(
        "--api-key=sesame",
        key_flag(tmp_path_factory.mktemp("keys"), "# comment", "from-file", "", "another"),
        "--metrics-key=scrape",
        "--cors-origin=https://app.example",
        "--root-path=/llm",
        "--memory-pressure-threshold=0.5",
    )


@pytest.mark.parametrize("key", ["sesame", "from-file", "another"])
def test_each_key_is_accepted(guarded: Server, key: str) -> None:
    for headers in (bearer(key), {"x-api-key": key}):
        assert guarded.client.get("/v1/models", headers=headers).status_code == 200
    assert key not in guarded.log.read_text()


@pytest.mark.parametrize(
    "headers",
    [
        *({}, bearer("sesam"), bearer("# comment"), {"x-api-key": "x"}),
        *({"authorization": wrong} for wrong in ("Bearer", "sesame")),
    ],
)
def test_any_other_key_is_a_401(guarded: Server, headers: dict[str, str]) -> None:
    for path in ("/v1/models", "/v1/chat/completions", "/nothing"):
        answer = guarded.client.post(path, headers=headers, json={})
        assert error_of(answer, 401)["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"] == "Bearer"
    assert "sesam" not in guarded.log.read_text()


@pytest.mark.parametrize("path", ["/metrics%0A", "/page/feed%0A", "/v1/models%0A"])
def test_a_path_with_a_line_break_does_not_exist_for_any_key(guarded: Server, path: str) -> None:
    for key in ("sesame", "scrape", "nothing"):
        error_of(guarded.client.get(path, headers=bearer(key)), 404)


@pytest.mark.parametrize("path", ["/health", "/livez", "/readyz", "/version"])
def test_probes_need_no_key(guarded: Server, path: str) -> None:
    assert guarded.client.get(path).status_code in (200, 503)


OWN_NAMES = (
    *("127.0.0.1:8000", "[::1]:8000", "192.168.0.7", "localhost:8000", "LocalHost.", "router:8000"),
    *(f"{socket.gethostname()}:80", "llm.example.com", "a.b.internal.example:8000"),
)
OTHER_NAMES = (
    *("internal.example.evil.com", "rebound.evil.com:8000", "127.0.0.1.evil.com", "example.com"),
    "a" + "." * 60_000,  # its endings would take 2 GB
)


@pytest.mark.parametrize("host", [*OWN_NAMES, *OTHER_NAMES])
def test_without_keys_only_own_names_are_served(keyless: Server, host: str) -> None:
    def status(path: str) -> int:
        return keyless.client.get(path, headers={"host": host}).status_code

    answer = keyless.client.get("/v1/models", headers={"host": host})
    if host in OWN_NAMES:
        ok(answer)
    else:
        error = error_of(answer, 403)
        assert error["code"] == "host_not_allowed" and "--allowed-host" in error["message"]
    for path in ("/livez", "/version"):
        assert status(path) == 200
    for path in ("/health", "/readyz", "/metrics"):  # they name models
        assert (status(path) == 403) == (host in OTHER_NAMES), path


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


def test_without_keys_the_log_says_so(keyless: Server, guarded: Server, server: Server) -> None:
    line = "no API key is set: everyone who can reach this machine can use the models"
    assert keyless.log.read_text().count(line) == 1
    assert line not in guarded.log.read_text() + server.log.read_text()


def log_line(server: Server, word: str) -> str:
    """Return the only line of the log that has ``word``."""
    eventually(lambda: word in server.log.read_text())
    (line,) = (line for line in server.log.read_text().splitlines() if word in line)
    return line


def test_each_request_is_one_line_of_the_log(guarded: Server) -> None:
    guarded.join("secret reply", cached_tokens=2)
    body = {"prompt": "secret prompt", "max_tokens": 3}
    headers = {**bearer("from-file"), "x-client-request-id": "mine-1", "x-request-id": "r-1"}
    answer = guarded.client.post("/v1/completions", json=body, headers=headers).json()
    line = log_line(guarded, "r-1")
    assert " info router: POST /v1/completions 200 key=key-" in line
    words = "model=tiny cached_tokens=2 output_tokens=3 queue_s=0.0 first_token_s= total_s= "
    words += f"finish=length prompt_tokens={answer['usage']['prompt_tokens']} id={answer['id']} "
    for word in (words + "request_id=r-1 client_id=mine-1").split():
        assert f" {word}" in line, word
    assert "secret" not in guarded.log.read_text()


def test_requests_that_fail_and_probes_are_told_apart_in_the_log(keyless: Server) -> None:
    keyless.join("hello world", hold_tokens_after=2)
    client, body = keyless.client, {"prompt": "x", "stream": True}
    client.post("/v1/completions", json=body | {"model": "no"}, headers={"x-request-id": "r-2"})
    found = json.loads(log_line(keyless, "r-2"))
    assert found["message"] == "POST /v1/completions 404"
    parts = (found["method"], found["path"], found["status"])
    assert parts == ("POST", "/v1/completions", 404)
    assert (found["error"], found["level"]) == ("model_not_found", "info")
    headers = {"x-request-id": "r-3"}
    with client.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
        assert any("wor" in line for line in answer.iter_lines())  # the second token has come
    found = json.loads(log_line(keyless, "r-3"))
    assert found["error"] == "client_disconnected"
    assert (found["output_tokens"], found["model"]) == (2, "tiny")
    client.get("/a%0Ab info router: forged", headers={"x-request-id": "r-4"})
    found = json.loads(log_line(keyless, "r-4"))
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


def complete(guarded: Server) -> httpx.Response:
    headers = bearer("sesame")
    return guarded.client.post("/v1/completions", json={"prompt": "x"}, headers=headers)


def test_health_follows_memory_pressure(guarded: Server) -> None:
    engine = guarded.join("hi")
    for used, status, code in ((10, "ok", 200), (40, "degraded", 200), (50, "overloaded", 503)):
        engine.behaviour.stats = EngineStats(limit_bytes=100, unevictable_bytes=used)
        eventually(has_status(guarded, status))
        assert guarded.client.get("/health").status_code == code
    answer = complete(guarded)
    assert error_of(answer, 503)["code"] == "memory_pressure"
    assert int(answer.headers["retry-after"]) >= 1
    engine.behaviour.stats = EngineStats(limit_bytes=100, unevictable_bytes=0)
    eventually(has_status(guarded, "ok"))
    ok(complete(guarded))


def test_models_are_listed_and_shown(served: Server) -> None:
    (model,) = served.client.get("/v1/models").json()["data"]
    assert (model["id"], model["object"]) == ("tiny", "model")
    assert (model["context_length"], model["ready_replicas"]) == (512, 1)
    assert served.client.get("/v1/models/tiny").json() == model


def test_metrics_have_the_names_that_dashboards_use(served: Server) -> None:
    stats: dict[str, Any] = {"running": 2, "used_blocks": 5, "free_blocks": 59, "limit_bytes": 1000}
    stats |= {"unevictable_bytes": 300, "prompt_tokens_total": 100, "cached_ram_tokens_total": 25}
    stats |= {"prefill_passes_total": 3, "prefill_stretches_total": 12, "open_passes": 4}
    served.engine.behaviour.stats = EngineStats(**stats)
    store = StoreStats(blocks=7, bytes=900, state="full", disk_errors_total=3)
    served.engine.behaviour.store = store
    ok(served.chat())
    label = '{engine="engine-0",model="tiny"}'
    eventually(lambda: f"used_blocks{label} 5.0" in scrape(served))
    text = scrape(served)
    own = {"kv_utilization": 0.3, "cached_ram_tokens_total": 25.0, "store_bytes": 900.0}
    own |= {"store_disk_errors_total": 3.0, "open_passes": 4.0, "prefill_passes_total": 3.0}
    own |= {"prefill_stretches_total": 12.0}
    figures = {"active_sequences": 2.0, "free_blocks": 59.0, "cache_hit_rate": 0.25}
    figures |= {f"mlx_lm_server_{name}": value for name, value in own.items()}
    histograms = ("time_to_first_token", "inter_token", "end_to_end", "queue_time")
    for line in (
        *(f"{name}{label} {value}" for name, value in figures.items()),
        *('queued_requests{model="tiny"} 0.0', "dist_fatal 0.0", "shutdown_clean 1.0"),
        'mlx_lm_server_store_state{engine="engine-0",model="tiny",state="full"} 1.0',
        'mlx_lm_server_store_state{engine="engine-0",model="tiny",state="ok"} 0.0',
        *(f"mlx_lm_server_{name}_seconds_count" for name in histograms),
        'mlx_lm_server_requests_total{path="/v1/chat/completions",status="200"}',
        "mlx_lm_server_build_info{",
    ):
        assert line in text, line


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
    body = BodyBytes(BodyBudget(lambda: 1000), "")
    with pytest.raises(BodyTimeout) as late:
        asyncio.run(receive_body(Request(scope, receive), 100, body, timeout_s=0.05))
    answer = error_response(late.value, {**scope, "state": {"path": "/", "request_id": "x"}})
    assert answer.status_code == 408
    assert json.loads(bytes(answer.body))["error"]["code"] == "request_timeout"
