"""`mlx-lm-server engine`: the processes of a machine whose engines join routers elsewhere."""

from __future__ import annotations

import io
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.commands import cli
from services.supervision import joining
from services.supervision.joining import joining_children
from services.supervision.launcher import ChildSpec
from shared import logs
from shared.rundir import RunDir
from shared.settings import Settings, parse, parse_models
from tests.commands import exit_code_of

FIRST, SECOND = "tcp://127.0.0.1:5555", "ipc:///run/second"
FAR = "--engine-socket=tcp://10.0.0.9:5"


def specs_of(directory: Path, *flags: str) -> list[ChildSpec]:
    flags = (f"--engine-socket={FIRST}", f"--engine-socket={SECOND}", "--model=demo", *flags)
    options, models = parse_models(flags, {}, "prog")
    with RunDir.create(directory) as run_dir:
        return joining_children(options, models, run_dir)


def parsed(spec: ChildSpec) -> Settings:
    return parse(spec.command[4:], {}, "prog")


def test_engines_join_all_routers_and_share_a_store_of_their_own(tmp_path: Path) -> None:
    store, *engines = specs_of(tmp_path, "--engines=2")
    host = socket.gethostname().partition(".")[0]
    assert (store.name, [each.name for each in engines]) == ("kvstore", [f"{host}-0", f"{host}-1"])
    for each in engines:
        assert parsed(each).engine_socket == (FIRST, SECOND)
        assert parsed(each).kvstore_socket == parsed(store).kvstore_socket
        assert each.announces_ready
    (address,) = parsed(store).kvstore_socket
    assert address.startswith(f"ipc://{tmp_path}/mlxlm-")


def test_a_store_elsewhere_takes_the_place_of_an_own_one(tmp_path: Path) -> None:
    (engine,) = specs_of(tmp_path, "--kvstore-socket=ipc:///run/blocks")
    assert parsed(engine).kvstore_socket == ("ipc:///run/blocks",)
    (engine,) = specs_of(tmp_path, "--no-ssd")
    assert parsed(engine).no_ssd


def test_models_that_do_not_fit_together_are_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "engines.toml"
    models = "".join(f'[[model]]\nid = "{name}"\nmemory-gb = 0.3\n' for name in "abc")
    file.write_text(f"fleet-memory-gb = 0.8\n{models}")
    flags = [f"--config={file}", f"--engine-socket={FIRST}", "--no-ssd"]
    assert cli.main(["engine", *flags]) == 78
    line = "this command loads all models at once, and they need 0.90 GB of 0.80 GB"
    (printed,) = capsys.readouterr().err.splitlines()
    assert line in printed
    file.write_text(f"fleet-memory-gb = 0.9\n{models}")
    options, entries = parse_models(flags, {}, "prog")
    with RunDir.create(tmp_path) as run_dir:
        engines = joining_children(options, entries, run_dir)
    assert [parsed(each).memory_gb for each in engines] == pytest.approx([0.3] * 3)


@pytest.mark.parametrize(
    ("flags", "code", "line"),
    [
        ([], 2, "--engine-socket is required: the address of the router to join"),
        ([FAR], 2, "10.0.0.9 is another machine, which requires --cu"),
        ([FAR, "--curve-dir=/nowhere"], 78, "--curve-dir: cannot read /nowhere/engine.key"),
    ],
)
def test_what_is_missing_is_one_line(
    flags: list[str], code: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = exit_code_of("engine", *flags)
    error = capsys.readouterr().err
    assert (found, error.count("\n")) == (code, 1)
    assert error.startswith("mlx-lm-server engine: ") and line in error


class Supervisor:
    """Is ready at once."""

    def __init__(self, *_: Any, on_ready: Callable[[], None], **__: Any) -> None:
        self._on_ready = on_ready

    def run(self) -> int:
        self._on_ready()
        return 7


class Unread(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_engines_keep_running_if_nobody_reads_that_they_are_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    options, _ = parse_models([f"--engine-socket={FIRST}", "--model=demo"], {}, "prog")
    monkeypatch.setattr(joining, "Supervisor", Supervisor)
    monkeypatch.setattr(logs, "setup", lambda *_: None)
    monkeypatch.setattr(sys, "stdout", Unread())
    with RunDir.create(tmp_path) as run_dir, caplog.at_level("INFO"):
        assert joining._supervise(options, [], run_dir) == 7
    assert f"mlx-lm-server engine ready, for {FIRST}" in caplog.text
