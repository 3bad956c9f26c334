"""Two machines' worth: `unshare -rnm python -m tests.e2e.two_machines MODEL DIRECTORY`.

It runs in namespaces of its own, which end with it. One network has a router and an engine, the
other an engine that joins over a cable (a veth pair), by IPv4 and with CURVE. It prints figures.
"""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

from services import keys
from tests.e2e.process import Process, running_process

PATIENCE_S = 60.0
SECOND = ("ip", "netns", "exec", "second")
HOST = socket.gethostname().partition(".")[0]
NEAR, FAR = f"{HOST}-0", f"second.{HOST}-0"
ADMIN = {"authorization": "Bearer boss"}
LONG: dict[str, Any] = {
    "prompt": "the same prompt",
    "max_tokens": 1200,
    "ignore_eos": True,
    "temperature": 0,
}


class Site:
    """The router and the engines of both networks."""

    def __init__(self, stack: ExitStack, model: str, directory: Path) -> None:
        self._stack, self._model, self._directory = stack, model, directory
        server = f"--curve-dir={directory}/server"
        keys.main(["server", server])
        self.allow(self.make_keys("second"), "second")
        private = f"ipc://{directory}/engines"
        self.router = self._run(
            "router",
            *("--engine-socket", private, "--engine-socket=tcp://[::]:5555", server),
            *("--host=127.0.0.1", "--port=0", "--admin-key=boss"),
        )
        url = self.router.wait_for(r"listening on (\S+)")[1]
        self.client = stack.enter_context(httpx.Client(base_url=url, timeout=PATIENCE_S))
        self._run("engine", "--engine-socket", private, *self._of_engine)
        self.join("second", "tcp://10.77.0.1:5555")

    def make_keys(self, name: str) -> str:
        public = (self._directory / "server" / "server.key").read_text().strip()
        keys.main(["engine", f"--curve-dir={self._directory / name}", "--server", public])
        return (self._directory / name / "engine.key").read_text().strip()

    def allow(self, key: str, name: str) -> None:
        keys.main(["allow", f"--curve-dir={self._directory}/server", key, f"--name={name}"])

    def join(self, name: str, address: str) -> Process:
        curve = f"--curve-dir={self._directory / name}"
        flags = ("--engine-socket", address, curve, *self._of_engine)
        return self._run("engine", *flags, prefix=SECOND)

    @property
    def _of_engine(self) -> tuple[str, ...]:
        return ("--model", self._model, "--no-ssd", "--kv-bits=16")

    def _run(self, *words: str, prefix: tuple[str, ...] = ()) -> Process:
        return self._stack.enter_context(running_process("mlx_lm_server", *words, prefix=prefix))

    def admin(self, method: str, path: str) -> Any:
        answer = self.client.request(method, f"/admin/{path}", headers=ADMIN)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def ready(self) -> list[str]:
        return sorted(e["name"] for e in self.admin("GET", "engines")["engines"] if e["ready"])

    def wait_until(self, condition: Callable[[], bool]) -> float:
        began = time.monotonic()
        while not condition():
            assert time.monotonic() < began + PATIENCE_S, "\n".join(self.router.log[-30:])
            time.sleep(0.05)
        return time.monotonic() - began

    def refused(self, reason: str) -> float:
        pattern = rf'mlx_lm_server_engines_refused_total\{{reason="{reason}"\}} (\S+)'
        found = re.search(pattern, self.client.get("/metrics").text)
        return float(found[1]) if found else 0.0

    def stream(self) -> Iterator[str]:
        """Yield the pieces of the text. An error event fails."""
        with self.client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    yield json.loads(line[6:])["choices"][0]["text"]


def main(model: str, directory: str) -> None:
    lay_cable()
    with ExitStack() as stack:
        site = Site(stack, model, Path(directory))
        site.wait_until(lambda: site.ready() == sorted([NEAR, FAR]))
        expected = "".join(site.stream())
        figures: dict[str, Any] = {"a wrong key": refuse_a_wrong_key(site)}
        figures |= cut_the_cable(site, expected)
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
    stranger = site.make_keys("stranger")
    engine = site.join("stranger", "tcp://10.77.0.1:5555")
    engine.wait_for("refuses this engine: the key .* is not on its list")
    site.wait_until(lambda: site.refused("key") >= 1)
    assert site.ready() == sorted([NEAR, FAR])
    assert sum(stranger in line for line in site.router.log) == 1
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
    back = site.wait_until(lambda: site.ready() == sorted([NEAR, FAR]))
    site.admin("POST", f"engines/{NEAR}/drain")
    assert "".join(site.stream()) == expected
    return {"longest pause s": round(longest, 2), "back after s": round(back, 2)}


if __name__ == "__main__":
    main(*sys.argv[1:])
