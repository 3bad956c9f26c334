"""`mlx-lm-server service`, beside programs that stand for launchctl and systemctl.

They keep the state of one service in a file, and note how they were called.
"""

from __future__ import annotations

import os
import plistlib
import shlex
import stat
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from services.commands.service import command as service
from services.supervision.bounded_log import LAUNCHD_LOG_VARIABLE
from shared.paths import python_path

_SYSTEMCTL = """#!/bin/sh
echo "systemctl $*" >> "$HOME/calls"
case "$*" in
    *broken*) echo "Failed to connect to bus" >&2; exit 1;;
    "--user restart "*) echo active > "$HOME/state";;
    "--user disable --now "*) rm -f "$HOME/state";;
    "--user show "*)
        printf 'MainPID=42\\nExecMainStatus=78\\nSubState=dead\\n'
        echo "ActiveState=$(cat "$HOME/state" 2>/dev/null || echo failed)";;
esac
"""
_LAUNCHCTL = """#!/bin/sh
echo "launchctl $*" >> "$HOME/calls"
case "$1" in
    bootstrap)
        [ -e "$HOME/state" ] && { echo "Bootstrap failed: 5: Input/output error" >&2; exit 5; }
        echo running > "$HOME/state";;
    bootout)
        [ -e "$HOME/state" ] || { echo "Boot-out failed: 3: No such process" >&2; exit 3; }
        echo ending > "$HOME/state";;
    print)
        [ -e "$HOME/state" ] || { echo "Could not find service" >&2; exit 113; }
        state=$(cat "$HOME/state")
        printf 'gui/501/name = {\\n\\tstate = %s\\n\\tpid = 42\\n\\tlast exit code = 78\\n' $state
        printf '\\tendpoints = {\\n\\t\\tstate = active\\n\\t}\\n}\\n'
        [ "$state" = ending ] && rm "$HOME/state";;
esac
exit 0
"""
_PRINTING = """#!/bin/sh
echo "$(basename "$0") $*"
"""


@dataclass
class Site:
    """A home directory of its own, and the programs on PATH."""

    home: Path

    def calls(self) -> list[str]:
        """Return the calls since the last time."""
        path = self.home / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return [line for line in lines if " print " not in line]

    @property
    def unit(self) -> Path:
        return self.home / ".config/systemd/user/mlx-lm-server.service"

    @property
    def plist(self) -> Path:
        return self.home / "Library/LaunchAgents/mlx-lm-server.plist"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    programs = tmp_path / "bin"
    programs.mkdir()
    texts = {"systemctl": _SYSTEMCTL, "launchctl": _LAUNCHCTL, "journalctl": _PRINTING}
    for name, text in {**texts, "tail": _PRINTING}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.chdir(tmp_path)
    return Site(tmp_path)


def section(unit: Path) -> dict[str, str]:
    lines = unit.read_text().splitlines()
    return dict(line.partition("=")[::2] for line in lines if "=" in line)


FLAGS = ["--model", "demo", "--port", "8123", "--drain-timeout-s", "60"]
COMMAND = [sys.executable, "-P", "-m", "mlx_lm_server", "serve", *FLAGS]


def test_a_unit_restarts_the_server_after_faults_and_lets_it_drain(site: Site) -> None:
    assert service.main(["install", *FLAGS], "linux") == 0
    found = section(site.unit)
    assert shlex.split(found["ExecStart"]) == COMMAND
    assert found["Restart"] == "on-failure"
    assert found["RestartPreventExitStatus"] == "2 78"
    assert found["KillMode"] == "mixed"
    assert found["ExecReload"] == "/bin/kill -HUP $MAINPID"
    assert found["Wants"] == found["After"] == "network-online.target"
    assert found["OOMPolicy"] == "continue"  # one engine's end is no reason to stop the others
    assert int(found["TimeoutStopSec"]) > 60
    assert found["WorkingDirectory"] == str(site.home)
    assert site.calls() == [
        "systemctl --user daemon-reload",
        "systemctl --user enable mlx-lm-server.service",
        "systemctl --user restart mlx-lm-server.service",
    ]


def test_what_systemd_would_replace_reaches_the_server_as_it_is(site: Site) -> None:
    template = 'a "b" \\ $HOME %h'
    secret = 'x y%z$"'
    arguments = ["--env", f"HF_TOKEN={secret}", "serve", "--chat-template", template]
    assert service.main(["install", *arguments], "linux") == 0
    found = section(site.unit)
    read = [part.replace("$$", "$").replace("%%", "%") for part in shlex.split(found["ExecStart"])]
    assert read[-2:] == ["--chat-template", template]
    assert "$$HOME" in found["ExecStart"] and "%%h" in found["ExecStart"]
    assert shlex.split(found["Environment"]) == [f"HF_TOKEN={secret.replace('%', '%%')}"]
    assert stat.S_IMODE(site.unit.stat().st_mode) == 0o600


def test_errors_that_last_do_not_restart_an_agent(tmp_path: Path) -> None:
    """launchd restarts after any exit code but 0."""
    for variables, code in (({}, 2), ({LAUNCHD_LOG_VARIABLE: "log"}, 0)):
        command = [sys.executable, "-m", "mlx_lm_server", "serve", "--no-such-flag"]
        done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True)
        assert done.returncode == code and b"--no-such-flag" in done.stderr


def test_the_log_of_an_agent_is_bounded(tmp_path: Path) -> None:
    log = tmp_path / "name.log"
    program = (
        "import os\n"
        "from services.supervision import bounded_log\n"
        "bounded_log.MAX_BYTES = 1000\n"
        "log = bounded_log.BoundedLog(os.environ)\n"
        "for number in range(10):\n"
        "    print('x' * 400, flush=True)\n"
        "    log.tick(number * 100.0)\n"
    )
    variables = {**os.environ, LAUNCHD_LOG_VARIABLE: str(log)}
    with log.open("ab") as output:
        subprocess.run([sys.executable, "-c", program], stdout=output, env=variables, check=True)
    assert log.stat().st_size == 401
    assert log.with_suffix(".log.1").stat().st_size == 3 * 401


def test_an_agent_restarts_the_server_after_faults_and_lets_it_drain(site: Site) -> None:
    assert service.main(["install", "--env", "HF_TOKEN=secret", *FLAGS], "darwin") == 0
    found = plistlib.loads(site.plist.read_bytes())
    assert found["Label"] == "mlx-lm-server"
    assert found["ProgramArguments"] == COMMAND
    variables = found["EnvironmentVariables"]
    assert variables.pop(LAUNCHD_LOG_VARIABLE) == found["StandardOutPath"]
    assert variables == {"PYTHONPATH": python_path(), "HF_TOKEN": "secret"}
    assert found["KeepAlive"] == {"SuccessfulExit": False} and found["RunAtLoad"]
    assert found["ExitTimeOut"] > 60
    assert Path(found["StandardErrorPath"]).parent.is_dir()
    assert stat.S_IMODE(site.plist.stat().st_mode) == 0o600
    assert site.calls() == [f"launchctl bootstrap gui/{os.getuid()} {site.plist}"]


def test_the_command_of_a_service_is_this_program(site: Site) -> None:
    """Also in the home directory, where it is started."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [*COMMAND[:4], "--version"], capture_output=True, text=True, env=environment
    )
    assert done.stdout.startswith("mlx-lm-server "), done.stderr


def test_an_agent_is_replaced_only_once_the_one_before_has_ended(site: Site) -> None:
    assert service.main(["install", *FLAGS], "darwin") == 0
    assert service.main(["install", "--model", "other"], "darwin") == 0
    assert plistlib.loads(site.plist.read_bytes())["ProgramArguments"][-1] == "other"
    assert service.main(["status"], "darwin") == 0
    _, bootout, bootstrap = site.calls()
    assert (bootout.split()[1], bootstrap.split()[1]) == ("bootout", "bootstrap")


@pytest.mark.parametrize("platform", ["darwin", "linux"])
def test_a_service_runs_until_it_is_uninstalled(
    site: Site, platform: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*argv: str) -> tuple[int, str]:
        code = service.main([*argv], platform)
        read = capsys.readouterr()
        return code, read.out + read.err

    code, text = run("status")
    assert code == 1 and "mlx-lm-server is not installed" in text
    assert run("install", *FLAGS)[0] == 0
    assert run("status") == (0, "mlx-lm-server: running, process 42\n")
    (site.home / "state").write_text("waiting")
    code, text = run("status")
    assert code == 1 and "last exit code 78" in text and text.startswith("mlx-lm-server: waiting")
    assert run("uninstall")[0] == 0
    file = site.plist if platform == "darwin" else site.unit
    assert not file.exists() and not (site.home / "state").exists()
    code, text = run("uninstall")
    assert code == 1 and text.count("\n") == 1 and "is not installed" in text


def test_names_keep_services_apart(site: Site) -> None:
    assert service.main(["install", "--name", "small", *FLAGS], "linux") == 0
    assert service.main(["install", "--name", "large", "--model", "large"], "linux") == 0
    assert {file.name for file in site.unit.parent.iterdir()} == {"small.service", "large.service"}
    assert service.main(["uninstall", "--name", "small"], "linux") == 0
    assert [file.name for file in site.unit.parent.iterdir()] == ["large.service"]


@pytest.mark.parametrize(
    ("platform", "line"),
    [
        ("linux", "journalctl --user --unit=mlx-lm-server.service --lines=7 --follow"),
        ("darwin", "tail -n 7 -F {home}/Library/Logs/mlx-lm-server.log"),
    ],
)
def test_logs_are_those_of_the_manager(
    site: Site, platform: str, line: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert service.main(["install", *FLAGS], platform) == 0
    capfd.readouterr()
    assert service.main(["logs", "-n", "7", "--follow"], platform) == 0
    assert capfd.readouterr().out == line.format(home=site.home) + "\n"


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["install", "--port", "many"], "--port"),
        (["install", "status"], "'status' cannot run as a service"),
        (["install", "--env", "HF_TOKEN"], "--env: expected NAME=VALUE"),
        (["install", "--config", "none.toml"], "none.toml"),
        (["install", "--name", "../escaped", "--model", "demo"], "--name"),
        (["status", "--port", "80"], "unrecognized arguments"),
    ],
)
def test_what_makes_no_sense_is_said_before_anything_is_written(
    site: Site, argv: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        service.main(argv, "linux")
    assert caught.value.code == 2
    assert reason in capsys.readouterr().err
    assert not site.calls() and not site.unit.parent.exists()


def test_a_manager_that_fails_is_an_error_of_one_line(
    site: Site, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert service.main(["install", "--name", "broken", *FLAGS], "linux") == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "Failed to connect to bus" in error
    monkeypatch.setenv("PATH", str(site.home))
    assert service.main(["install", *FLAGS], "linux") == 1
    assert "cannot run systemctl" in capsys.readouterr().err
    assert service.main(["install", *FLAGS], "win32") == 1
    assert "services are not supported on win32" in capsys.readouterr().err
