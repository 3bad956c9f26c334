"""`mlx-lm-server doctor`: set-ups that are broken on purpose, each in a real way."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvstore.directory import BlockDirectory
from services.commands import cli
from services.commands.doctor import command, machine, meeting
from services.processes import listener
from services.processes.model_files import INDEX, problems
from shared.network.curve import create_pair
from tests.commands import ROOT, TIMEOUT_S, run_command

_LINUX = sys.platform == "linux"


Found = Iterator[tuple[str, str, str]]
"""What is broken, the check that has to find it, and in which words."""


@dataclass
class BrokenMachine:
    """A folder with what is broken, and the flags and variables that lead there."""

    root: Path
    good_model: Path
    stack: ExitStack
    flags: list[str] = field(default_factory=lambda: ["--host=127.0.0.1"])
    environment: dict[str, str] = field(default_factory=dict)

    def break_everything(self) -> list[tuple[str, str, str]]:
        return [*self._addresses(), *self._places(), *self._programs(), *self._models()]

    def _addresses(self) -> Found:
        taken = self.stack.enter_context(listener.listen("127.0.0.1", 0))
        port = taken.getsockname()[1]
        taken.close()  # what takes it answers nothing, not even a connection
        other = self.stack.enter_context(socket.socket())
        other.bind(("127.0.0.1", port))
        other.listen()
        other.settimeout(0)
        self.flags.append(f"--port={port}")
        yield "port taken", "http", f"--port: {port} is in use"

        path = self.root / "engines"
        other = self.stack.enter_context(socket.socket(socket.AF_UNIX))
        other.bind(str(path))
        other.listen()
        self.flags.append(f"--engine-socket=ipc://{path}")
        yield "socket in use", "engine-socket", "a running process uses"

        create_pair(self.root / "keys", "server")
        (self.root / "keys" / "server.secret").chmod(0o644)
        self.flags.append(f"--curve-dir={self.root / 'keys'}")
        yield "secret key readable by others", "keys", "can be read by other users"

        for name in ("certfile", "keyfile"):
            (self.root / name).write_text("no PEM")
            self.flags.append(f"--ssl-{name}={self.root / name}")
        yield "certificate is none", "TLS", "--ssl-certfile"

    def _places(self) -> Found:
        self.stack.callback(BlockDirectory(self.root / "blocks").close)
        self.flags.append(f"--ssd-cache-dir={self.root / 'blocks'}")
        yield "a server uses the folder of blocks", "SSD cache", "a running server uses"

        self.flags.append("--disk-reserve-gb=1e9")
        yield "less room on the disk than is to stay free", "SSD cache", "no blocks will be written"

        (self.root / "file").touch()
        self.environment["HF_HOME"] = str(self.root / "file" / "below")
        yield "hub's cache is not writable", "model cache", "is not a folder"

        if _LINUX:  # where nobody can write, and access rights allow root to
            self.flags.append("--response-store-dir=/proc/responses")
            words = "/proc is not writable (No such file or directory)"
            yield "responses cannot be written", "responses", words

    def _programs(self) -> Found:
        # An ssh that fails as one does without a network, in the place of the machine's.
        programs = self.root / "programs"
        programs.mkdir()
        (programs / "ssh").write_text("#!/bin/sh\necho 'ssh: no route to host' >&2; exit 255\n")
        (programs / "ssh").chmod(0o755)
        self.environment["PATH"] = f"{programs}{os.pathsep}{os.environ['PATH']}"
        hosts = [{"ssh": name, "ips": ["192.0.2.1"]} for name in ("here", "elsewhere")]
        (self.root / "hosts.json").write_text(json.dumps(hosts))
        self.flags.append(f"--distributed-hostfile={self.root / 'hosts.json'}")
        words = "cannot use elsewhere: ssh: no route to host"
        yield "another machine cannot be reached", "hosts", words

        if _LINUX:
            missing = self.root / "packages"
            missing.mkdir()
            (missing / "onnxruntime.py").write_text("raise ImportError('no onnxruntime here')")
            path = f"{missing}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
            self.environment["PYTHONPATH"] = path
            yield "ONNX Runtime is missing", "ONNX Runtime", "no onnxruntime here"

    def _models(self) -> Found:
        half, corrupt, cut = (self.root / name for name in ("half", "corrupt", "cut"))
        for path in (half, corrupt, cut):
            shutil.copytree(self.good_model, path)
        index = {"weight_map": {"a": "model.safetensors", "b": "model-00002.safetensors"}}
        (half / INDEX).write_text(json.dumps(index))
        (corrupt / "config.json").write_text('{"model_type": "lla')
        size = (cut / "model.safetensors").stat().st_size
        os.truncate(cut / "model.safetensors", size // 2)
        text = "".join(f'[[model]]\npath = "{path}"\n' for path in (half, corrupt, cut))
        text += '[[model]]\nid = "gone/"\n'
        text += f'[[model]]\nid = "large"\npath = "{self.good_model}"\nmemory-gb = 0.000001\n'
        (self.root / "server.toml").write_text(text)
        self.flags.append(f"--config={self.root / 'server.toml'}")
        yield "half downloaded", "model", "1 of 2 weight files are missing: model-00002"
        yield "corrupt config", "model", "config.json is not valid JSON"
        words = f"model.safetensors is truncated: {size // 2} of {size}"
        yield "cut file of weights", "model", words
        yield "no such model", "model", "folder gone/ does not exist"
        yield "too little memory", "model memory", "do not fit in 0.0 GB"


def test_each_broken_set_up_is_found_with_a_remedy(
    socket_dir: Path, tiny_model: Callable[..., Path]
) -> None:
    """All at once, in one run of the command as a user starts it."""
    with ExitStack() as stack:
        machine = BrokenMachine(socket_dir, tiny_model("llama"), stack)
        expected = machine.break_everything()
        done = run_command("doctor", "--json", *machine.flags, **machine.environment)
    assert done.returncode == 1 and done.stdout, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    bad = [each for each in found if each["verdict"] == "BAD"]
    for what, name, words in expected:
        own = [each for each in bad if each["name"] == name and words in each["text"]]
        assert len(own) == 1, f"{what} in {bad}"
        assert own[0]["remedy"], what
    assert len(bad) == len(expected) >= 13, bad


def test_too_few_descriptors_are_found() -> None:
    """By a process of its own, as they cannot be more again."""
    code = "from services.commands.doctor import machine; print(*machine.checks(None), sep='\\n')"
    found = subprocess.run(
        ["bash", "-c", 'ulimit -n 512; exec "$@"', "bash", sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=True,
    ).stdout
    assert "name='descriptors', text='limit of 512" in found
    assert found.count("verdict='BAD'") == 1, found


def test_settings_that_make_no_sense_are_found_and_the_machine_is_looked_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "server.toml").write_text("max-batch-sise = 8\n")
    assert cli.main(["doctor", f"--config={tmp_path / 'server.toml'}"]) == 1
    report = capsys.readouterr().out
    assert "BAD  settings      --config: unknown key 'max-batch-sise'" in report
    assert "did you mean max-batch-size?" in report
    assert "ok   run folder" in report
    assert "\n1 to fix" in report


def test_nothing_is_bad_where_nothing_is(
    tiny_model: Callable[..., Path], tmp_path: Path, free_port: int
) -> None:
    model, blocks = tiny_model("llama"), tmp_path / "ssd"
    flags = ["--host=127.0.0.1", f"--port={free_port}", "--disk-reserve-gb=0"]
    found = list(command.examine([*flags, f"--model={model}", f"--ssd-cache-dir={blocks}"]))
    assert [each for each in found if each.verdict == "BAD"] == []
    assert any(each.name == "model memory" and each.verdict == "ok" for each in found)
    assert not blocks.exists(), "it changes nothing"
    little = list(command.examine([*flags, f"--model={model}", "--memory-gb=0.5"]))
    (found_memory,) = (each for each in little if each.name == "model memory")
    assert found_memory.verdict == "WARN", "such an engine starts"


def test_a_limit_of_processors_is_found(tmp_path: Path) -> None:
    assert machine.cpu_limit(tmp_path).verdict == "ok"
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert machine.cpu_limit(tmp_path).verdict == "ok"
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    found = machine.cpu_limit(tmp_path)
    assert found.verdict == "WARN" and "may use 0.5 of them" in found.text


def test_files_that_are_no_models_are_told_apart(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    assert problems(tiny_model("llama")) == []
    assert problems(tmp_path / "none") == [f"{tmp_path / 'none'} is not a folder"]
    assert problems(tmp_path) == [
        *("config.json is missing", "there are no model*.safetensors files"),
        "there is no tokenizer",
    ]
    (tmp_path / "config.json").write_text("[]")
    (tmp_path / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0not json")
    (tmp_path / "tokenizer.json").write_text("")
    assert problems(tmp_path) == [
        "config.json is not a JSON object",
        "model.safetensors is not a safetensors file",
        "tokenizer.json is not valid JSON",
    ]


@pytest.mark.parametrize("scheme", ["tcp", "dns+tcp"])
def test_a_name_that_leads_nowhere_is_found(scheme: str) -> None:
    host = 70 * "a" + ".invalid"  # too long to ask anybody
    found = meeting._socket("--engine-socket", f"{scheme}://{host}:5555")
    assert found.verdict == "BAD"
    assert found.text.startswith(f"{host} cannot be resolved (")
