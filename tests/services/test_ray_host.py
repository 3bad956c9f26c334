"""The actor beside an engine, and what follows it, without Ray."""

from __future__ import annotations

import importlib
import io
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest

from services.supervision.launcher import ChildSpec, MachineNeeds
from services.supervision.output import LogCollector
from services.supervision.ray.host import EngineHost


@pytest.mark.parametrize("told_to_end", [False, True])
def test_an_actor_that_ends_leaves_no_keys_behind(
    told_to_end: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    host._told_to_end = told_to_end
    with nullcontext() if told_to_end else pytest.raises(SystemExit):
        while ("exit", 3) not in host.read():
            pass
    assert not directory.exists()


class RayError(Exception):
    pass


class RayActorError(RayError):
    pass


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Ray with one actor, whose calls return at once."""
    found = MagicMock()
    found.exceptions = MagicMock(RayError=RayError, RayActorError=RayActorError)
    found.wait = lambda refs, timeout: (refs, [])
    for name in (
        "",
        ".exceptions",
        ".util",
        ".util.placement_group",
        ".util.scheduling_strategies",
    ):
        module: Any = found
        for part in name.split(".")[1:]:
            module = getattr(module, part)
        monkeypatch.setitem(sys.modules, f"ray{name}", module)
    monkeypatch.delitem(sys.modules, "services.supervision.ray.launcher", raising=False)
    return found


def test_an_engine_that_ray_cannot_reach_any_more_has_ended(
    ray: Any, caplog: pytest.LogCaptureFixture
) -> None:
    launcher: ModuleType = importlib.import_module("services.supervision.ray.launcher")
    found: list[Any] = [[("beat", b'{"phase": "ready"}\n')], RayError("the cluster is lost")]

    def get(_: Any) -> Any:
        said = found.pop(0)
        if isinstance(said, Exception):
            raise said
        return said

    ray.get = get
    spec = ChildSpec(name="e", command=(), place=MachineNeeds())
    output = LogCollector("text", io.StringIO())
    process = launcher.RayProcess(spec, spec.place, {}, output, time.monotonic())
    process.wait()
    assert not process.refresh(time.monotonic())
    assert (process.state.phase, process.state.exit_code) == ("ready", -9)
    assert "lost e" in caplog.text
    process.close()
    output.close()
