"""The command line as a whole: help, completion, readers that leave."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pexpect
import pytest

from services.commands import cli
from services.commands.completion import SHELLS, whole_parser
from shared.flags import flags_of
from shared.settings import COMMON_FLAGS, Settings
from tests.commands import ROOT, exit_code_of

PATIENCE_S = 60
ASKING = ("status", "engines", "drain", "restart", "cache", "keys")
"""Commands that ask a server. Their help has exit codes."""


def help_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as caught:
        cli.main([*words])
    assert caught.value.code == 0
    return capsys.readouterr().out


def test_help_shows_the_commands_and_the_ten_common_flags(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = help_of(capsys, "--help")
    listed = [line.split()[0] for line in text.splitlines() if line.startswith("  -")]
    assert listed == [f"--{name}" for name in COMMON_FLAGS]
    assert len(listed) == 10
    assert all(f"  {name} " in text for name in cli.COMMANDS)
    assert "--help-all shows all" in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 80


def test_ctrl_c_before_a_command_handles_it_prints_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("importlib.import_module", interrupted)
    assert cli.main(["serve", "--model=demo"]) == 130
    assert capsys.readouterr() == ("", "")


def test_the_first_process_of_a_container_can_be_stopped_before_its_command_handles_signals(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handled: dict[int, Any] = {}
    codes: list[int] = []
    monkeypatch.setattr(signal, "signal", handled.__setitem__)
    monkeypatch.setattr(os, "_exit", codes.append)
    assert (cli.main(["--version"]), handled) == (0, {}), "elsewhere the system ends it"
    monkeypatch.setattr(os, "getpid", lambda: 1)
    assert cli.main(["--version"]) == 0
    handled[signal.SIGTERM](signal.SIGTERM, None)
    assert codes == [143]


def test_the_help_of_a_command_names_it_and_says_what_it_does(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    said = {}
    for name in cli.COMMANDS:
        assert exit_code_of(name, "--help") == 0
        text = capsys.readouterr().out
        assert "Exit codes: 0" in text or name not in ASKING
        usage, _, rest = text.partition("\n\n")
        shown = "usage: mlx-lm-server [" if name == "serve" else f"usage: mlx-lm-server {name}"
        assert usage.startswith(shown)
        said[name] = rest.splitlines()[0]
        assert not said[name].endswith("..")
    assert len(set(said.values())) == len(said), said
    assert "--json" in said["doctor"]


def test_help_all_shows_every_flag_at_the_width_of_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = help_of(capsys, "serve", "--help-all")
    assert all(f"  --{flag.name} " in f"{text} " for flag in flags_of(Settings))
    names = [line for line in text.splitlines() if len(line) > 80]
    assert all(line.strip().startswith(("--", "{")) for line in names), names


def run_to(output: int, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command whose buffered output goes to the descriptor ``output``."""
    return subprocess.run(
        [sys.executable, "-m", "mlx_lm_server", *words],
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"},
        stdout=output,
        stderr=subprocess.PIPE,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


@pytest.mark.parametrize("words", [["engines", "--help"], ["--version"]])
def test_a_reader_that_leaves_ends_a_command_without_a_word(words: list[str]) -> None:
    """As `| head` does, but certainly before the first line."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        done = run_to(write_end, *words)
    finally:
        os.close(write_end)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_an_output_on_a_full_disk_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        done = run_to(full.fileno(), "completion", "bash")
    assert done.returncode == 1
    assert done.stderr == "mlx-lm-server: cannot write: No space left on device\n"


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_a_stream_that_is_closed_is_none_of_the_files(closed: str) -> None:
    program = (
        "import os, sys; from services.commands import cli; code = cli.main(['--version']);"
        "print(end='', flush=True), print(end='', file=sys.stderr, flush=True);"
        "os._exit(code or any(each.fileno() != n for n, each in"
        " enumerate((sys.stdin, sys.stdout, sys.stderr))))"
    )
    command = ["sh", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=PATIENCE_S, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("words", [["status", "--what"], ["keys"], ["bench", "serve", "--seed=x"]])
def test_a_wrong_argument_is_one_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("mlx-lm-server ") and line.endswith(" --help)")


def test_every_command_and_flag_is_in_the_parser_of_the_shells() -> None:
    text = whole_parser().format_help()
    assert all(f"--{flag.name}" in text for flag in flags_of(Settings))
    assert all(name in text for name in cli.COMMANDS)


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the completion of each shell."""
    folder = tmp_path_factory.mktemp("completion")
    for shell in SHELLS:
        with (folder / shell).open("w") as script, redirect_stdout(script):
            assert cli.main(["completion", shell]) == 0
    (folder / "settings-of-mine.toml").touch()
    return folder


@pytest.fixture(scope="module")
def bash(scripts: Path) -> Iterator[pexpect.spawn]:
    """An interactive bash that has read the script."""
    shell = pexpect.spawn(
        "bash",
        ["--norc", "--noprofile", "-i"],
        cwd=str(scripts),
        env={**os.environ, "PS1": "$ ", "TERM": "dumb", "INPUTRC": "/dev/null"},
        dimensions=(50, 200),
        timeout=PATIENCE_S,
        encoding="utf-8",
    )
    shell.sendline("bind 'set enable-bracketed-paste off'; source ./bash; echo re''ad")
    shell.expect("read\r\n")
    yield shell
    shell.close(force=True)


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("sta", "tus "),
        ("serve --max-batch-s", "ize "),
        ("--max-conc", "urrent-requests "),
        ("chat --key-v", "ariable "),
        ("cache ve", "rify "),
        ("serve --config sett", "ings-of-mine.toml "),
        ("bench se", "rve "),
        ("bench serve --request-r", "ate "),
        ("bench serve --workload multi", "-turn "),
        ("bench plot sett", "ings-of-mine.toml "),
        ("bench kv --memory-g", "b "),
        ("models ls --memory-g", "b "),
    ],
)
def test_bash_completes_commands_flags_and_files(
    bash: pexpect.spawn, typed: str, completed: str
) -> None:
    bash.send(f"mlx-lm-server {typed}\t")
    bash.expect_exact(completed)
    bash.sendcontrol("u")


@pytest.mark.skipif(shutil.which("zsh") is None, reason="there is no zsh")
def test_zsh_completes_commands_and_flags(scripts: Path, tmp_path: Path) -> None:
    shutil.copy(scripts / "zsh", tmp_path / "_mlx-lm-server")
    environment = {**os.environ, "TERM": "dumb", "ZDOTDIR": str(tmp_path)}
    options: dict[str, Any] = {"dimensions": (50, 200), "encoding": "utf-8", "env": environment}
    shell = pexpect.spawn("zsh", ["-f", "-i"], timeout=PATIENCE_S, **options)
    try:
        shell.sendline(
            f"fpath=({tmp_path} $fpath); autoload -U compinit && compinit -u -D; echo re''ad"
        )
        shell.expect("read\r\n")
        for typed, completed in (
            ("sta", "tus"),
            ("serve --max-batch-s", "ize"),
            ("bench serve --request-r", "ate"),
        ):
            shell.send(f"mlx-lm-server {typed}\t")
            shell.expect_exact(completed)
            shell.sendcontrol("u")
    finally:
        shell.close(force=True)


@pytest.mark.skipif(shutil.which("fish") is None, reason="there is no fish")
def test_fish_completes_commands_and_flags(scripts: Path) -> None:
    for typed, completed in (("sta", "status"), ("bench serve --request-r", "--request-rate")):
        found = subprocess.run(
            ["fish", "-c", f"source {scripts / 'fish'}; complete -C 'mlx-lm-server {typed}'"],
            capture_output=True,
            text=True,
            check=True,
            timeout=PATIENCE_S,
        ).stdout
        assert found.split()[0] == completed
