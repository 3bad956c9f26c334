"""The actor beside an engine, without Ray."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from services.supervision.ray.host import EngineHost


def test_an_actor_that_ends_leaves_no_keys_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def popen(command: list[str], **fields: Any) -> subprocess.Popen[bytes]:
        engine = [sys.executable, "-c", "print('\"ready\"', flush=True); exit(3)"]
        return start(engine, **fields)

    def ends(code: int) -> None:
        raise SystemExit(code)

    start = subprocess.Popen
    monkeypatch.setattr("services.supervision.ray.host.subprocess.Popen", popen)
    monkeypatch.setattr("services.supervision.ray.host.os._exit", ends)
    host = EngineHost("e", [], {"engine.secret": "secret"})
    directory = Path(host._directory.name)
    assert (directory / "engine.secret").read_text() == "secret"
    with pytest.raises(SystemExit):
        while True:
            host.read()
    assert not directory.exists()
