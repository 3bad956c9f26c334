"""The command line, and the processes that `serve` starts."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from services import cli, listener, local
from shared.rundir import RunDir
from shared.settings import Settings, parse
from shared.version import installed_version

ROOT = Path(__file__).resolve().parents[2]


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mlx_lm_server", *argv],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_port_in_use_is_an_error_of_one_line() -> None:
    with listener.listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        result = run("--host=127.0.0.1", f"--port={port}", "--model=demo")
    assert result.returncode == 1
    assert result.stderr == f"mlx-lm-server: --port: {port} is in use by another program\n"
    assert result.stdout == ""


def test_a_host_of_another_machine_is_an_error_of_one_line() -> None:
    result = run("--host=192.0.2.1", "--port=0")
    assert result.returncode == 1
    assert result.stderr.startswith("mlx-lm-server: --host: cannot listen on 192.0.2.1:0 (")
    assert result.stderr.count("\n") == 1


def test_a_bad_flag_is_an_error_of_one_line_with_code_2() -> None:
    result = run("serve", "--port=x")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "mlx-lm-server: --port: 'x' is not a whole number\n"


def test_an_unknown_command_is_an_error_of_one_line_with_code_2() -> None:
    result = run("docter")
    assert result.returncode == 2
    assert result.stderr == "mlx-lm-server: unknown command 'docter'; did you mean doctor?\n"


def test_a_missing_model_ends_the_server_and_leaves_no_files(tmp_path: Path) -> None:
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    result = subprocess.run(
        [
            *(sys.executable, "-m", "mlx_lm_server", "--host=127.0.0.1", "--port=0"),
            *(f"--model={tmp_path / 'nonsense'}", f"--ssd-cache-dir={tmp_path / 'ssd'}"),
        ],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 78
    assert "Traceback" not in result.stderr
    assert str(tmp_path / "nonsense") in result.stderr
    assert list(tmp_path.glob("mlxlm-*")) == []


def test_help_lists_the_commands_and_the_flags(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert all(name in text for name in (*cli.COMMANDS, "--model", "--port"))


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"mlx-lm-server {installed_version()}\n"


def test_doctor_reports_a_port_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    with listener.listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        assert cli.main(["doctor", "--host=127.0.0.1", f"--port={port}"]) == 1
    report = capsys.readouterr().out
    assert f"BAD http          --port: {port} is in use" in report
    assert "ok  sockets" in report
    assert "ok  device" in report


def test_children_use_sockets_in_the_run_directory(tmp_path: Path) -> None:
    argv = ["--model=demo", "--engines=2"]
    settings = parse(argv, {}, "prog")
    with RunDir.create(tmp_path) as run_dir, socket.socket() as http:
        specs = local.children(settings, argv, http, run_dir)
        assert [spec.name for spec in specs] == ["kvstore", "engine-0", "engine-1", "router"]
        for spec in specs:
            assert f"--engine-socket=ipc://{run_dir.path}/engines" in spec.command
            again = parse(spec.command[4:], {}, "prog")
            assert (again.model, again.engines) == ("demo", 2)
        (router,) = (spec for spec in specs if spec.announces_ready)
        assert router.descriptors == {"_MLX_LM_SERVER_HTTP_FD": http.fileno()}
        stages = {spec.name.split("-")[0]: spec.stop_stage for spec in specs}
        assert stages["router"] < stages["engine"] < stages["kvstore"]


def test_keys_are_in_no_childs_arguments_and_only_in_the_routers_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLX_LM_SERVER_METRICS_KEY", "sesame")
    argv = ["--api-key", "sesame", "--model=demo", "--api-key=sesame2"]
    settings = parse(argv, os.environ, "prog")
    with RunDir.create(tmp_path) as run_dir, socket.socket() as http:
        specs = local.children(settings, argv, http, run_dir)
    for spec in specs:
        assert not any("sesame" in word for word in spec.command)
        environment = {
            **{name: os.environ[name] for name in os.environ.keys() - spec.hidden_variables},
            **spec.environment,
        }
        again = parse(spec.command[4:], environment, "prog")
        assert again.model == "demo"
        if spec.name == "router":
            assert again.api_key == ("sesame", "sesame2")
            assert again.metrics_key == "sesame"
        else:
            assert "sesame" not in str(environment)
            assert (again.api_key, again.metrics_key) == ((), None)


def test_configured_sockets_are_used_and_no_ssd_starts_no_kvstore(tmp_path: Path) -> None:
    argv = ["--no-ssd", "--engine-socket=ipc:///run/e"]
    settings = parse(argv, {}, "prog")
    with RunDir.create(tmp_path) as run_dir, socket.socket() as http:
        specs = local.children(settings, argv, http, run_dir)
    assert [spec.name for spec in specs] == ["engine-0", "router"]
    assert parse(specs[0].command[4:], {}, "prog").engine_socket == "ipc:///run/e"


def test_engines_allocate_in_huge_pages_unless_the_user_sets_tunables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def engine() -> str | None:
        with RunDir.create(tmp_path) as run_dir, socket.socket() as http:
            specs = local.children(parse(["--no-ssd"], {}, "prog"), [], http, run_dir)
        return specs[0].environment.get("GLIBC_TUNABLES")

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
