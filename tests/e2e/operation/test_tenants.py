"""Keys, traces and the log of a whole server: supervisor, router, engine."""

from __future__ import annotations

import os
import re
import secrets
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from shared.environment import HUB_TOKENS
from shared.settings import SECRET_VARIABLES, SECRETS_VARIABLE
from tests.e2e.server import Server, serving
from tests.stand_ins.collector import Collector, collecting


class Tenanted(NamedTuple):
    server: Server
    keys: Path
    collector: Collector

    def complete(self, key: str, **headers: str) -> httpx.Response:
        return self.server.client.post(
            "/v1/completions",
            json={"prompt": "xyzzy", "max_tokens": 5},
            headers={"authorization": f"Bearer {key}", **headers},
        )


@pytest.fixture(scope="module")
def tenanted(
    tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Tenanted]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("sesame-file name=alice\n")
    with (
        collecting() as collector,
        serving(
            tiny_model("llama"),
            *("--no-ssd", "--api-key", "sesame-flag", f"--api-key-file={keys}"),
            f"--otlp-endpoint={collector.url}",
            TEST_FORKS="0",
            OTEL_BSP_SCHEDULE_DELAY="200",
        ) as server,
    ):
        yield Tenanted(server, keys, collector)


def test_no_child_has_a_key_in_its_arguments(tenanted: Tenanted) -> None:
    assert tenanted.complete("sesame-flag").status_code == 200
    children = tenanted.server.pids("services.")
    ranks = tenanted.server.pids("services.processes.rank ")
    assert len(children) == 2 + len(ranks)
    for pid in children:
        assert "sesame" not in Path(f"/proc/{pid}/cmdline").read_text()
    (engine,) = tenanted.server.pids("services.processes.engine")
    for pid in (engine, *ranks):
        assert "sesame" not in Path(f"/proc/{pid}/environ").read_text()


def test_a_hang_up_of_the_server_makes_its_router_read_the_keys_again(tenanted: Tenanted) -> None:
    before = tenanted.keys.stat()
    tenanted.keys.write_text("sesame-next name=alice\n")
    os.utime(tenanted.keys, ns=(before.st_atime_ns, before.st_mtime_ns))
    tenanted.server.process.send_signal(signal.SIGHUP)
    tenanted.server.wait_until(lambda: tenanted.complete("sesame-next").status_code == 200)
    assert tenanted.complete("sesame-file").status_code == 401
    assert not any("sesame" in line for line in tenanted.server.log)


def test_a_trace_goes_through_router_and_engine(tenanted: Tenanted) -> None:
    trace_id, parent_id = secrets.token_hex(16), secrets.token_hex(8)
    answer = tenanted.complete("sesame-flag", traceparent=f"00-{trace_id}-{parent_id}-01")
    assert re.fullmatch(rf"00-{trace_id}-[0-9a-f]{{16}}-01", answer.headers["traceparent"])
    names = {"POST /v1/completions", "queue", "sequence", "prefill", "decode"}
    collector = tenanted.collector
    tenanted.server.wait_until(lambda: collector.trace(trace_id).keys() == names)
    spans = collector.trace(trace_id)
    request, sequence = spans["POST /v1/completions"], spans["sequence"]
    assert request.parent_id == parent_id
    assert request.span_id == answer.headers["traceparent"].split("-")[2]
    assert spans["queue"].parent_id == sequence.parent_id == request.span_id
    assert spans["prefill"].parent_id == spans["decode"].parent_id == sequence.span_id
    assert request.service == spans["queue"].service == "mlx-lm-server router"
    assert sequence.service == spans["decode"].service == "mlx-lm-server engine"
    assert request.attributes["gen_ai.usage.output_tokens"] == "5"
    assert sequence.attributes["gen_ai.usage.output_tokens"] == "5"
    assert request.attributes["gen_ai.response.id"] == answer.json()["id"]
    assert request.seconds >= sequence.seconds >= spans["decode"].seconds >= 0
    assert not any("xyzzy" in str(span.attributes) for span in collector.spans)


def test_a_request_without_a_trace_begins_one_and_probes_have_none(tenanted: Tenanted) -> None:
    answer = tenanted.complete("sesame-flag", traceparent="rubbish")
    trace_id = answer.headers["traceparent"].split("-")[1]
    tenanted.server.wait_until(lambda: "sequence" in tenanted.collector.trace(trace_id))
    assert "traceparent" not in tenanted.server.client.get("/livez").headers


def test_no_process_shows_a_secret_in_its_environment(tiny_model: Callable[..., Path]) -> None:
    """Except for the user's token of the hub, in processes that download. Processes that handle
    untrusted input have no variables of other programs either."""
    variables = {
        "MLX_LM_SERVER_API_KEY": "sesame-key",
        "MLX_LM_SERVER_ADMIN_KEY": "sesame-admin",
        "MLX_LM_SERVER_METRICS_KEY": "sesame-metrics",
        "MLX_LM_SERVER_REASONING_KEY": "sesame-reasoning",
        "MLX_LM_SERVER_LIMITS_URL": "redis://:sesame-redis@127.0.0.1:1",
        "HF_TOKEN": "sesame-hub",
        "HUGGING_FACE_HUB_TOKEN": "sesame-hub",
    }
    assert variables.keys() - HUB_TOKENS == SECRET_VARIABLES - {SECRETS_VARIABLE}
    flags = ("--spare-engine-after-s", "0.1")
    foreign = {"SOME_OTHER_PROGRAMS_PASSWORD": "sesame-foreign"}
    with serving(tiny_model("llama"), *flags, **variables, **foreign, TEST_FORKS="0") as server:
        server.client.headers["authorization"] = "Bearer sesame-key"
        server.chat("hi", response_format={"type": "json_object"})
        modules = [f"services.processes.{name} " for name in ("router", "kvstore", "engine")]
        modules += ["services.processes.engine_spare"]
        sandboxes = ["engine.grammar.checker", "router.tokens.template_process"]
        modules += sandboxes
        server.wait_until(lambda: all(server.pids(name) for name in modules), what=str(modules))
        downloads = server.pids("services.processes.engine ")
        sandboxed = [pid for name in sandboxes for pid in server.pids(name)]
        for pid in (server.process.pid, *server.pids()):
            shown = Path(f"/proc/{pid}/environ").read_text()
            found = set(re.findall(r"sesame-\w+", shown))
            allowed = {"sesame-hub", "sesame-foreign"} if pid in downloads else {"sesame-foreign"}
            assert found <= (set() if pid in sandboxed else allowed), (pid, found)
        assert not any("sesame" in line for line in server.log)
