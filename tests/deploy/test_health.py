"""`deploy/health.py engine URL`, beside an HTTP server that answers as a router's /health."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

HEALTH = Path(__file__).parents[2] / "deploy" / "health.py"
HOST = socket.gethostname().partition(".")[0]


class HealthSite:
    """What /health lists next, and where."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}/health"
        self.status = 200
        self.engines: list[dict[str, Any]] = []

    def check(self) -> tuple[int, str]:
        command = [sys.executable, str(HEALTH), "engine", self.url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        return done.returncode, done.stderr


@pytest.fixture
def site() -> Iterator[HealthSite]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps({"models": [{"engines": found.engines}]}).encode()
            self.send_response(found.status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    found = HealthSite(server.server_port)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield found
    server.shutdown()
    thread.join()
    server.server_close()


def engine(name: str, trouble: str | None = None) -> dict[str, Any]:
    return {"name": name, "ready": trouble is None, "trouble": trouble}


def test_an_engine_is_ready_when_a_router_says_so(site: HealthSite) -> None:
    other = engine(f"keys.{HOST}-other-0")
    site.engines = [other]
    assert site.check() == (1, f"engine: no engine of {HOST} has joined\n")
    site.engines = [other, engine(f"keys.{HOST}-0", "loading")]
    assert site.check() == (1, f"engine: keys.{HOST}-0: loading\n")
    site.status = 503  # of another model
    site.engines = [engine("keys.elsewhere-0", "stalled"), engine(f"keys.{HOST}-0")]
    assert site.check() == (0, "")


def test_a_router_that_is_gone_is_an_error_of_one_line(free_port: int) -> None:
    url = f"http://127.0.0.1:{free_port}/health"
    command = [sys.executable, str(HEALTH), "engine", url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1 and "refused" in done.stderr
