"""The command line, and the processes that `serve` starts."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest

from services.commands import cli
from services.processes import listener
from services.supervision import local
from services.supervision.launcher import ChildSpec
from shared import logs, settings
from shared.rundir import RunDir
from shared.settings import Settings, parse, parse_models
from shared.version import installed_version
from tests.commands import exit_code_of
from tests.forked.process import start_process


def test_a_port_in_use_is_an_error_of_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with listener.listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        assert cli.main(["--host=127.0.0.1", f"--port={port}", "--model=demo"]) == 1
    hint = "--port 0 picks a free port"
    line = f"mlx-lm-server: --port: {port} is in use by another program; {hint}\n"
    assert capsys.readouterr() == ("", line)


def test_a_name_with_addresses_of_both_kinds_is_served_at_its_ipv4_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = [
        (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", 0, 0, 0)),
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0)),
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [*found])
    with listener.listen("localhost", 0) as http:
        assert http.getsockname()[0] == "127.0.0.1"


@pytest.mark.parametrize(
    ("argv", "code", "line"),
    [
        (["--host=192.0.2.1", "--port=0"], 1, "--host: cannot listen on 192.0.2.1:0 ("),
        (["serve", "--port=x"], 2, "--port: 'x' is not a whole number\n"),
        (["docter"], 2, "unknown command 'docter'; did you mean doctor?\n"),
    ],
)
def test_a_wrong_word_or_address_is_an_error_of_one_line(
    argv: list[str], code: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = exit_code_of(*argv)
    out, error = capsys.readouterr()
    assert (found, out, error.count("\n")) == (code, "", 1)
    assert error.startswith(f"mlx-lm-server: {line}")


def test_a_missing_model_ends_the_server_and_leaves_no_files(tmp_path: Path) -> None:
    flags = (f"--model={tmp_path / 'nonsense'}", f"--ssd-cache-dir={tmp_path / 'ssd'}")
    words = ("--host=127.0.0.1", "--port=0", *flags)
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    server = start_process("mlx_lm_server", words, environment)
    assert server.stdout is not None
    said = server.stdout.read()
    assert server.wait(60) == 78
    assert "Traceback" not in said and str(tmp_path / "nonsense") in said
    assert list(tmp_path.glob("mlxlm-*")) == []


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"mlx-lm-server {installed_version()}\n"


def specs_of(
    argv: list[str], directory: Path, environ: Mapping[str, str] = MappingProxyType({})
) -> list[ChildSpec]:
    """Return the specs of a server's processes, with one engine of each model."""
    settings, models = parse_models(argv, environ, "prog")
    with RunDir.create(directory) as run_dir, socket.socket() as http:
        children = local.Children(settings, run_dir)
        engines = [children.engine(model, f"engine-{n}", 10**9) for n, model in enumerate(models)]
        kvstore = [] if settings.no_ssd else [children.kvstore()]
        return [*kvstore, children.router(http), *engines]


def parsed(spec: ChildSpec, environ: Mapping[str, str] = MappingProxyType({})) -> Settings:
    """Return the settings that a child gets."""
    return parse(spec.command[4:], environ, "prog")


def test_children_use_sockets_in_the_run_directory(tmp_path: Path) -> None:
    specs = specs_of(["--model=demo", "--engines=2"], tmp_path)
    assert [spec.name for spec in specs] == ["kvstore", "router", "engine-0"]
    for spec in specs:
        (address,) = (word for word in spec.command if word.startswith("--engine-socket="))
        assert address.startswith(f"--engine-socket=ipc://{tmp_path}/mlxlm-")
        assert (parsed(spec).model, parsed(spec).engines) == ("demo", 2)
    (router,) = (spec for spec in specs if spec.announces_ready)
    assert int(router.descriptors["_MLX_LM_SERVER_HTTP_FD"]) > 0
    stages = {spec.name.split("-")[0]: spec.stop_stage for spec in specs}
    assert stages["router"] < stages["engine"] < stages["kvstore"]


def test_keys_are_in_no_childs_arguments_and_only_in_the_routers_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLX_LM_SERVER_METRICS_KEY", "sesame")
    argv = ["--api-key", "sesame", "--model=demo", "--api-key=sesame2"]
    for spec in specs_of(argv, tmp_path, os.environ):
        assert not any("sesame" in word for word in spec.command)
        environment = {
            **{name: os.environ[name] for name in os.environ.keys() - spec.hidden_variables},
            **spec.environment,
        }
        again = parsed(spec, environment)
        assert again.model == "demo"
        if spec.name == "router":
            assert again.api_key == ("sesame", "sesame2")
            assert again.metrics_key == "sesame"
        else:
            assert "sesame" not in str(environment)
            assert (again.api_key, again.metrics_key) == ((), None)


def test_variables_that_are_settings_reach_children_as_flags_alone(tmp_path: Path) -> None:
    environ = {"MLX_LM_SERVER_TRUST_REMOTE_CODE": "1", "MLX_LM_SERVER_NO_SSD": "0"}
    for spec in specs_of(["--model=demo"], tmp_path, environ):
        assert spec.hidden_variables >= environ.keys()
        assert "MLX_LM_SERVER_BLAS" not in spec.hidden_variables
        assert parsed(spec).trust_remote_code and not parsed(spec).no_ssd


def test_others_join_at_configured_sockets_and_no_ssd_starts_no_kvstore(tmp_path: Path) -> None:
    specs = specs_of(["--no-ssd", "--engine-socket=ipc:///run/e"], tmp_path)
    assert [spec.name for spec in specs] == ["router", "engine-0"]
    router, engine = (parsed(spec).engine_socket for spec in specs)
    assert len(engine) == 1 and engine[0].startswith(f"ipc://{tmp_path}/mlxlm-")
    assert router == (*engine, "ipc:///run/e")


def test_engines_have_the_settings_of_their_model_and_read_no_file_themselves(
    tmp_path: Path,
) -> None:
    file = tmp_path / "server.toml"
    file.write_text(
        'temperature = 0.3\n[[model]]\nid = "a"\npath = "demo"\naliases = ["x"]\nkv_bits = 16\n'
        'num_blocks = "auto"\n[[model]]\nid = "org/b"\ntemperature = 0.9\n'
        "chat_template_args = { deep = true }\n"
    )
    environ = {"MLX_LM_SERVER_CONFIG": str(file), "MLX_LM_SERVER_NUM_BLOCKS": "64"}
    specs = specs_of(["--port=0"], tmp_path, environ)
    file.unlink()
    assert all("MLX_LM_SERVER_CONFIG" in spec.hidden_variables for spec in specs)
    environ.pop("MLX_LM_SERVER_CONFIG")
    a, b = (parsed(spec, environ) for spec in specs if spec.name.startswith("engine"))
    assert (a.model, a.served_model_name, a.kv_bits) == ("demo", ("a", "x"), 16)
    assert (a.temperature, a.num_blocks, a.memory_gb) == (0.3, None, 1.0)
    assert (b.model, b.served_model_name, b.kv_bits) == ("org/b", ("org/b",), 8)
    assert (b.temperature, b.num_blocks) == (0.9, 64)
    assert b.chat_template_args == {"deep": True}


class HungUpSupervisor:
    """Gets SIGHUP, and ends."""

    times = 1

    def __init__(self, *_: object, on_hang_up: Callable[[], None], **__: object) -> None:
        self._on_hang_up = on_hang_up

    def run(self) -> int:
        for _ in range(self.times):
            self._on_hang_up()
        return 0


def test_settings_that_cannot_be_read_again_end_no_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def read(*_: object) -> None:
        raise ValueError("no such thing")

    fleet: Any = SimpleNamespace(close=lambda: None)
    monkeypatch.setattr(local, "Supervisor", HungUpSupervisor)
    monkeypatch.setattr(local, "EngineFleet", lambda *_: fleet)
    monkeypatch.setattr(logs, "setup", lambda *_: None)
    options, models = parse_models([f"--model={tmp_path}"], {}, "prog")
    monkeypatch.setattr(settings, "read", read)
    with RunDir.create(tmp_path) as run_dir, socket.socket() as http:
        assert local._supervise([], {}, options, models, http, run_dir) == 0
    assert "keeping the old settings: no such thing" in caplog.text


def test_a_file_that_has_lost_its_models_changes_nothing_though_it_had_none_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "server.toml"
    file.write_text(f'model = "{tmp_path}"\n')
    later = iter((f'[[model]]\npath = "{tmp_path}"\n', ""))
    read = settings.read
    served: list[str] = []

    def read_next(*given: Any) -> Any:
        file.write_text(next(later))
        return read(*given)

    fleet: Any = SimpleNamespace(
        close=lambda: None, reconfigure=lambda _, entries: served.append(entries[0].id)
    )
    monkeypatch.setattr(local, "Supervisor", HungUpSupervisor)
    monkeypatch.setattr(HungUpSupervisor, "times", 2)
    monkeypatch.setattr(local, "EngineFleet", lambda *_: fleet)
    monkeypatch.setattr(logs, "setup", lambda *_: None)
    argv = [f"--config={file}"]
    options, models = parse_models(argv, {}, "prog")
    monkeypatch.setattr(settings, "read", read_next)
    with RunDir.create(tmp_path) as run_dir, socket.socket() as http:
        assert local._supervise(argv, {}, options, models, http, run_dir) == 0
    assert served == [str(tmp_path)]
    assert "has no [[model]] any more" in caplog.text


def test_engines_allocate_in_huge_pages_unless_the_user_sets_tunables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def engine() -> str | None:
        return specs_of(["--no-ssd"], tmp_path)[-1].environment.get("GLIBC_TUNABLES")

    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    assert "hugetlb=1" in (engine() or "")
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.arena_max=1")
    assert engine() is None


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("0.0.0.0", "http://127.0.0.1:"),
        ("127.0.0.1", "http://127.0.0.1:"),
        ("::1", "http://[::1]:"),
    ],
)
def test_the_printed_url_can_be_opened(host: str, expected: str) -> None:
    try:
        http = listener.listen(host, 0)
    except listener.ListenError:
        pytest.skip(f"no {host} on this machine")
    with http:
        port = http.getsockname()[1]
        assert local.url(Settings(), http) == f"{expected}{port}"
