"""Two machines' worth: `unshare -rnm python -m tests.e2e.ranks.two_machines MODEL DIRECTORY`.

It runs in namespaces of its own, which end with it. One network has a server, the other an engine
that joins over a cable (a veth pair): the commands are those of docs/operations.md. It prints
figures.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.process import ROOT, Process, running_process, wait_until
from tests.e2e.server import pieces

PATIENCE_S = 60.0
SECOND = ("ip", "netns", "exec", "second")
NEAR, FAR = "engine-0", f"studio.{socket.gethostname().partition('.')[0]}-0"
OF_TESTS = ("--no-ssd", "--kv-bits=16")
ADMIN = {"authorization": "Bearer boss"}
LONG: dict[str, Any] = {
    "prompt": "the same prompt",
    "max_tokens": 1200,
    "ignore_eos": True,
    "temperature": 0,
}


def recipe() -> list[list[str]]:
    """Return the commands of the page that says how another machine joins, without the program."""
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    section = page.partition("\n## Engines on other machines\n")[2].partition("\n## ")[0]
    commands = re.findall(r"^    mlx-lm-server (.+)$", section, re.MULTILINE)
    assert len(commands) == 5, commands
    return [shlex.split(command) for command in commands]


class Machine:
    """One of the two: its home, and how a command is run in its network."""

    def __init__(self, home: Path, prefix: tuple[str, ...] = ()) -> None:
        home.mkdir()
        self.home, self._prefix = home, prefix

    def make(self, words: list[str]) -> str:
        """Run a command that ends; return the key that it prints."""
        return re.findall("[0-9a-f]{64}", self.do(words))[0]

    def do(self, words: list[str]) -> str:
        """Run a command that ends; return what it prints."""
        return subprocess.run(
            [*self._prefix, sys.executable, "-m", "mlx_lm_server", *words],
            env=os.environ | {"HOME": str(self.home)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout

    def run(self, stack: ExitStack, words: list[str]) -> Process:
        return stack.enter_context(
            running_process("mlx_lm_server", *words, prefix=self._prefix, HOME=str(self.home))
        )


class Site:
    """Two machines, as the recipe sets them up."""

    def __init__(self, stack: ExitStack, model: str, directory: Path) -> None:
        self._stack = stack
        own, far, allow, serve, join = recipe()
        self._far, self._join = far, join
        self._values = {"MODEL": model, "SERVER": "10.77.0.1"}
        self.first = Machine(directory / "first")
        self.second = Machine(directory / "second", SECOND)
        self._values["SERVER_KEY"] = self.first.make(own)
        self._values["ENGINE_KEY"] = self.second.make(self._filled(far))
        self.first.make(self._filled(allow))
        flags = ["--host=127.0.0.1", "--port=0", "--admin-key=boss", *OF_TESTS]
        self.server = self.first.run(stack, self._filled(serve) + flags)
        self.join(self.second)
        url = self.server.wait_for(r"ready: (http://\S+)")[1]
        self.client = stack.enter_context(httpx.Client(base_url=url, timeout=PATIENCE_S))

    def make_keys(self, machine: Machine) -> str:
        return machine.make(self._filled(self._far))

    def join(self, machine: Machine) -> Process:
        return machine.run(self._stack, [*self._filled(self._join), *OF_TESTS])

    def _filled(self, words: list[str]) -> list[str]:
        """Put the values in the places of the recipe's words in capitals."""
        pattern = re.compile(r"\b(SERVER_KEY|ENGINE_KEY|MODEL|SERVER)\b")
        return [pattern.sub(lambda found: self._values[found[1]], word) for word in words]

    def admin(self, method: str, path: str) -> Any:
        answer = self.client.request(method, f"/admin/{path}", headers=ADMIN)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def ready(self) -> list[str]:
        return sorted(e["name"] for e in self.admin("GET", "engines")["engines"] if e["ready"])

    def wait_until(self, condition: Callable[[], bool]) -> float:
        return wait_until(condition, self.server)

    def print_log(self, kind: object, *_: object) -> None:
        """Print the end of the server's log if there was an error."""
        if kind is not None:
            sys.stderr.write("\n".join(self.server.log[-60:]) + "\n")

    def refused(self, reason: str) -> float:
        pattern = rf'mlx_lm_server_engines_refused_total\{{reason="{reason}"\}} (\S+)'
        found = re.search(pattern, self.client.get("/metrics").text)
        return float(found[1]) if found else 0.0

    def stream(self) -> Iterator[str]:
        return pieces(self.client, **LONG)


def main(model: str, directory: str) -> None:
    lay_cable()
    with ExitStack() as stack:
        site = Site(stack, model, Path(directory))
        stack.push(site.print_log)
        site.wait_until(lambda: site.ready() == [NEAR, FAR])
        expected = "".join(site.stream())
        figures: dict[str, Any] = {"a wrong key": refuse_a_wrong_key(site)}
        figures |= cut_the_cable(site, expected)
        figures["restarted after s"] = restart_the_far_engine(site)
        print(json.dumps(figures))  # noqa: T201


def lay_cable() -> None:
    ip("link set lo up")
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/run"], check=True)
    ip("netns add second")
    ip("link add first type veth peer name second netns second")
    ip("addr add 10.77.0.1/24 dev first")
    ip("link set first up")
    ip("-n second addr add 10.77.0.2/24 dev second")
    ip("-n second link set second up")
    ip("-n second link set lo up")


def ip(arguments: str) -> None:
    subprocess.run(["ip", *arguments.split()], check=True)


def refuse_a_wrong_key(site: Site) -> str:
    """Let a stranger try to join while others are served."""
    machine = Machine(site.second.home.with_name("stranger"), SECOND)
    stranger = site.make_keys(machine)
    engine = site.join(machine)
    engine.wait_for("refuses this engine: the key .* is not on its allow list")
    site.wait_until(lambda: site.refused("key") >= 1)
    assert site.ready() == [NEAR, FAR]
    site.wait_until(lambda: any(stranger in line for line in site.server.log))
    assert sum(stranger in line for line in site.server.log) == 1
    engine.popen.kill()
    return "refused"


def cut_the_cable(site: Site, expected: str) -> dict[str, float]:
    """Cut the cable in the middle of a stream of the far engine, and mend it afterwards."""
    site.admin("POST", f"engines/{NEAR}/drain")
    pieces = site.stream()
    text, longest, last = next(pieces), 0.0, time.monotonic()
    site.admin("POST", f"engines/{NEAR}/drain?undo=true")
    (request,) = site.admin("GET", "requests")["requests"]
    assert request["engine"] == FAR
    ip("link set first down")
    for piece in pieces:
        text += piece
        longest, last = max(longest, time.monotonic() - last), time.monotonic()
    assert text == expected
    assert site.ready() == [NEAR]
    ip("link set first up")
    back = site.wait_until(lambda: site.ready() == [NEAR, FAR])
    site.admin("POST", f"engines/{NEAR}/drain")
    assert "".join(site.stream()) == expected
    return {"longest pause s": round(longest, 2), "back after s": round(back, 2)}


def restart_the_far_engine(site: Site) -> float:
    """Restart it from here: a supervisor of its own machine starts it again."""

    def incarnation() -> str:
        engines = site.admin("GET", "engines")["engines"]
        return next((str(one["incarnation"]) for one in engines if one["name"] == FAR), "")

    before, began = incarnation(), time.monotonic()
    url = f"--url={site.client.base_url}"
    site.first.do(["restart", FAR, "--wait", "--admin-key=boss", url])
    assert incarnation() not in ("", before)
    return round(time.monotonic() - began, 2)


if __name__ == "__main__":
    main(*sys.argv[1:])
