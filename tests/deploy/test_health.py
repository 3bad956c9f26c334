"""`deploy/health.py engine URL`, beside an HTTP server that answers as a router's /health."""

from __future__ import annotations

import importlib.util
import json
import socket
from collections.abc import Iterator
from email.message import Message
from pathlib import Path
from typing import Any

import pytest

from tests.stand_ins.http_server import answering

_SPEC = importlib.util.spec_from_file_location(
    "deployed_health", Path(__file__).parents[2] / "deploy" / "health.py"
)
assert _SPEC is not None and _SPEC.loader is not None
health = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(health)
vars(health)["TIMEOUT_S"] = 60.0  # the machine of the tests may stand still for seconds
HOST = socket.gethostname().partition(".")[0]


class HealthSite:
    """What /health lists next, and where."""

    def __init__(self) -> None:
        self.url = ""
        self.status = 200
        self.engines: list[dict[str, Any]] = []

    def answer(self, path: str, headers: Message) -> tuple[int, bytes]:
        return self.status, json.dumps({"models": [{"engines": self.engines}]}).encode()


@pytest.fixture
def site() -> Iterator[HealthSite]:
    found = HealthSite()
    with answering(found.answer) as url:
        found.url = f"{url}/health"
        yield found


def engine(name: str, trouble: str | None = None) -> dict[str, Any]:
    return {"name": name, "ready": trouble is None, "trouble": trouble}


def test_an_engine_is_ready_when_a_router_says_so(
    site: HealthSite, capsys: pytest.CaptureFixture[str]
) -> None:
    def check() -> tuple[int, str]:
        return health.main("engine", site.url), capsys.readouterr().err

    other = engine(f"keys.{HOST}-other-0")
    site.engines = [other]
    assert check() == (1, f"engine: no engine of {HOST} has joined\n")
    site.engines = [other, engine(f"keys.{HOST}-0", "loading")]
    assert check() == (1, f"engine: keys.{HOST}-0: loading\n")
    site.status = 503  # of another model
    site.engines = [engine("keys.elsewhere-0", "stalled"), engine(f"keys.{HOST}-0")]
    assert check() == (0, "")


def test_a_router_that_is_gone_is_an_error_of_one_line(
    free_port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert health.main("engine", f"http://127.0.0.1:{free_port}/health") == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "refused" in error


def test_no_proxy_is_asked(
    site: HealthSite, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port}")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("urllib.request._opener", None)  # it would have been made without these
    site.engines = [engine(f"keys.{HOST}-0")]
    assert health.main(site.url) == health.main("engine", site.url) == 0
