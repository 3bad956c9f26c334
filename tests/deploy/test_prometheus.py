"""A real Prometheus scrapes a real server under load: every panel of the dashboard has data."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
import zmq

from services.commands import cli
from tests.conftest import unused_port
from tests.deploy.test_monitoring import DASHBOARD, MONITORING
from tests.e2e.server import Server, serving

PROMETHEUS = shutil.which("prometheus")
PATIENCE_S = 200.0
METRICS_KEY = "metrics-key"
KEYS = "alice-key name=alice\nbob-key name=bob rpm=1\n"

pytestmark = pytest.mark.skipif(
    PROMETHEUS is None, reason="prometheus is not installed (Debian's package prometheus)"
)


@contextmanager
def prometheus_of(server: Server, directory: Path) -> Iterator[httpx.Client]:
    """Run Prometheus with deploy/monitoring's configuration, on ``server`` and more often."""
    config = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(MONITORING / "alerts.yml")]
    (job,) = config["scrape_configs"]
    job["static_configs"] = [{"targets": [f"127.0.0.1:{server.port}"]}]
    job["authorization"] = {"credentials": METRICS_KEY}
    (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
    port = unused_port()
    command = [
        *(PROMETHEUS or "", f"--config.file={directory}/prometheus.yml"),
        *(f"--storage.tsdb.path={directory}/data", f"--web.listen-address=127.0.0.1:{port}"),
    ]
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}/api/v1", timeout=60) as client:
            yield client
    finally:
        process.terminate()
        process.wait(60)


@contextmanager
def traffic(server: Server) -> Iterator[None]:
    """Ask as two clients, one of whom may not ask so often, until the end."""
    end = threading.Event()

    def ask(key: str) -> None:
        while not end.is_set():
            body = {"prompt": "a b a b a b a b" * 4, "max_tokens": 24, "temperature": 0}
            headers = {"authorization": f"Bearer {key}"}
            url = f"http://127.0.0.1:{server.port}/v1/completions"
            with httpx.stream(
                "POST", url, json=body | {"stream": True}, headers=headers, timeout=60
            ) as answer:
                for _ in answer.iter_lines():
                    pass
            end.wait(0.2)

    threads = [threading.Thread(target=ask, args=(key,)) for key in ("alice-key", "bob-key")]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        end.set()
        for thread in threads:
            thread.join()


def panel_queries() -> dict[str, str]:
    """Return all queries of panels, with Grafana's variables as for all models and keys."""
    found = {}
    for panel in DASHBOARD["panels"]:
        for number, target in enumerate(panel.get("targets", ())):
            query = target["expr"].replace("$__rate_interval", "1m")
            query = query.replace("$model", ".*").replace("$key", ".*")
            assert "$" not in query
            found[f"{panel['title']} {number}"] = query
    return found


def data_of(prometheus: httpx.Client, query: str) -> list[float]:
    """Return the values of ``query`` that are numbers."""
    try:
        answer = prometheus.get("/query", params={"query": query})
    except httpx.TransportError:  # it is starting
        return []
    if answer.status_code != 200:
        assert answer.status_code != 400, answer.text
        return []
    values = [float(one["value"][1]) for one in answer.json()["data"]["result"]]
    return [value for value in values if not math.isnan(value)]


def knock(address: str) -> Callable[[], None]:
    """Connect without keys, which is refused; return what ends that."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.connect(address)
    return lambda: context.destroy(linger=0)


@pytest.mark.slow
def test_every_panel_has_data_under_load(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "keys.txt").write_text(KEYS)
    assert cli.main(["keys", "init", "--curve-dir", f"{tmp_path}/curve"]) == 0
    address = f"tcp://127.0.0.1:{unused_port()}"
    flags = (
        *("--api-key-file", f"{tmp_path}/keys.txt", "--metrics-key", METRICS_KEY),
        *("--spec-decode", "ngram"),
        *("--engine-socket", address, "--curve-dir", f"{tmp_path}/curve"),
    )
    with (
        serving(tiny_model("llama"), *flags) as server,
        prometheus_of(server, tmp_path) as prometheus,
        traffic(server),
    ):
        leave = knock(address)
        wanted = panel_queries()
        missing = dict(wanted)
        lost = False

        def all_have_data() -> bool:
            nonlocal lost
            for name, query in list(missing.items()):
                if data_of(prometheus, query):
                    del missing[name]
            if not lost and len(missing) < len(wanted) / 4:  # what is counted for a lost engine
                server.kill("engine")
                lost = True
            return not missing

        try:
            server.wait_until(all_have_data, PATIENCE_S, "panels without data")
        except AssertionError as error:
            raise AssertionError(f"no data: {json.dumps(missing, indent=1)}\n{error}") from None
        finally:
            leave()
        rules: list[dict[str, Any]] = []

        def evaluated() -> bool:
            groups = prometheus.get("/rules").json()["data"]["groups"]
            rules[:] = [rule for group in groups for rule in group["rules"]]
            return bool(rules) and all(rule["health"] != "unknown" for rule in rules)

        server.wait_until(evaluated, PATIENCE_S, "alerts that are evaluated")
        assert {rule["health"] for rule in rules} == {"ok"}, rules
        assert len(wanted) > 50 and len(rules) == 13
