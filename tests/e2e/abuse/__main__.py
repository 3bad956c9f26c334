"""Clients that mean no good, beside one that does: `python -m tests.e2e.abuse`.

A whole server with two API keys, or without keys behind a proxy that names two addresses. One
key's clients do everything on the list of `tests.e2e.abuse.attacks`, one thing after the other.
Meanwhile the other key streams short answers and `/livez` is asked: neither may wait for the first
key's clients, and the router's event loop may never stand still.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import re
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

from engine.model.load import resolve
from tests.e2e.abuse.attack import Attack
from tests.e2e.abuse.attacks import GREEDY, abuses, run_abuse
from tests.e2e.abuse.connections import MAX_CONNECTIONS, RANDOM_FRAMING
from tests.e2e.abuse.machine import count_stalls, counting_late_wakes, waited_s
from tests.e2e.server import Server, serving
from tests.e2e.soak.report import print_line
from tests.forked.process import FORKS_VARIABLE
from tests.tiny_models import CHAT_TEMPLATE, make_tiny

GOOD, BAD = "192.0.2.1", "192.0.2.2"
"""The keys, and the addresses of clients without keys."""
GOOD_SOURCE = "127.0.0.3" if sys.platform == "linux" else None
"""The address of this machine from which the good clients connect: connections of one address have
a limit. macOS has 127.0.0.1 alone."""
WITH_KEYS = ("--api-key", GOOD, "--api-key", BAD)
WITHOUT_KEYS = ("--trusted-proxy", "127.0.0.1")
FLAGS = (
    *("--no-ssd", "--num-blocks", "2000"),
    f"--max-connections-per-address={MAX_CONNECTIONS}",
)
CONTEXT = 8192
TEMPLATE = (
    "{% for tool in tools or () %}{{ tool.function.name }}\n{% endfor %}"
    "{% for a in range(rounds or 0) %}{% for m in messages %}{% endfor %}{% endfor %}"
    "{% if grows %}{% set n = namespace(s='ab') %}"
    "{% for a in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}{% endif %}" + CHAT_TEMPLATE
)
"""Of the tiny model: with all of a large tool in it, a prompt would be refused at once. It loops as
those do that look at all messages for each, and grows as a hostile one."""
LIVEZ_S, LIVEZ_WORST_S = 0.1, 0.5
LAG_S = 0.1
FIRST_TOKEN_FACTOR = 1.5
GREEDY_FACTOR = 2
"""The same while another key uses all that it may."""
MIN_FIRST_TOKEN_S = 0.02
"""A tiny model has its first token before other processes have had their turn."""
PROBE_EVERY_S = 0.05
BASELINE_S = 4.0


@dataclass
class Measured:
    """What the good clients saw while something went on."""

    livez_s: list[float] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)
    stalls: int = 0
    """How often the event loop stood still for too long."""
    machine_stalls: int = 0
    """How often a process that only sleeps was woken so late, or the router did not get a processor
    for half of such a time: the machine had no time for it."""

    @property
    def usual_livez_s(self) -> float:
        """The time within which 95 of 100 probes are answered."""
        return statistics.quantiles(self.livez_s, n=20)[-1] if len(self.livez_s) > 1 else 0.0

    @property
    def median_first_token_s(self) -> float:
        return statistics.median(self.first_token_s) if self.first_token_s else float("inf")

    def line(self) -> str:
        livez = f"livez {1000 * self.usual_livez_s:4.0f} {1000 * max(self.livez_s):5.0f}"
        token = f"first token {1000 * self.median_first_token_s:4.0f}"
        return f"{livez} ms, {token} ms, {self.stalls} stalls ({self.machine_stalls})"


class Watch:
    """The good clients: probes, and short streams."""

    def __init__(
        self,
        server: Server,
        stall_s: float,
        machine_stalls: Synchronized[int],
        prompt_tokens: int | None,
    ) -> None:
        self._port = server.port
        (self._router,) = server.pids("services.processes.router")
        self._stall_s = stall_s
        self._machine_stalls = machine_stalls
        self._prompt_tokens = prompt_tokens

    @contextmanager
    def measuring(self) -> Iterator[Measured]:
        measured = Measured()
        stop = threading.Event()
        stalls, machine_stalls = self._count_stalls(), self._machine_stalls.value
        threads = [
            threading.Thread(target=each, args=(measured, stop))
            for each in (self._probe, self._stream, self._count_waits)
        ]
        for thread in threads:
            thread.start()
        try:
            yield measured
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        measured.stalls = self._count_stalls() - stalls
        measured.machine_stalls += self._machine_stalls.value - machine_stalls

    def _probe(self, measured: Measured, stop: threading.Event) -> None:
        while not stop.wait(PROBE_EVERY_S):
            began = time.monotonic()
            if b" 200 " not in self._get("/livez")[:20]:
                measured.failures["livez"] += 1
            measured.livez_s.append(time.monotonic() - began)

    def _stream(self, measured: Measured, stop: threading.Event) -> None:
        while not stop.wait(PROBE_EVERY_S):
            # Tokens of its own, so that none is cached.
            own = [random.randrange(3, 200) for _ in range(self._prompt_tokens or 0)]
            body = json.dumps({"prompt": own or "abc", "max_tokens": 2, "stream": True}).encode()
            good = Attack(self._port, GOOD)  # it connects as an attack does, and means well
            head = good.head("/v1/completions", len(body), "Connection: close")
            began = time.monotonic()
            with good.connect(source=GOOD_SOURCE) as client:
                client.sendall(head + body)
                found = b""
                while b"data: " not in found:
                    piece = client.recv(65536)
                    if not piece:
                        break
                    found += piece
                if b"data: " in found:
                    measured.first_token_s.append(time.monotonic() - began)
                else:
                    measured.failures[found[9:12].decode() or "closed"] += 1
                while client.recv(65536):
                    pass

    def _count_waits(self, measured: Measured, stop: threading.Event) -> None:
        before = waited_s(self._router)
        while not stop.wait(self._stall_s / 2):
            now = waited_s(self._router)
            measured.machine_stalls += now - before > self._stall_s / 4
            before = now

    def _count_stalls(self) -> int:
        return count_stalls(self._get("/metrics").decode(), self._stall_s)

    def _get(self, path: str) -> bytes:
        with Attack(self._port, GOOD).connect(source=GOOD_SOURCE) as client:
            client.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
            found = b""
            while piece := client.recv(65536):
                found += piece
            return found


def abuse(
    server: Server,
    names: Sequence[str],
    seconds: float,
    slack: float,
    stall_s: float = LAG_S,
    prompt_tokens: int | None = None,
) -> list[str]:
    """Do each of ``names`` for some ``seconds``. Return what was wrong; limits of time are
    multiplied by ``slack``. The good client's prompts are short, or have ``prompt_tokens``."""
    wrong = []
    processes = server.pids("services.")
    context = multiprocessing.get_context("spawn")
    with (
        counting_late_wakes(stall_s) as machine_stalls,
        ProcessPoolExecutor(1, mp_context=context, initializer=os.nice, initargs=(10,)) as pool,
    ):
        watch = Watch(server, stall_s, machine_stalls, prompt_tokens)
        pool.submit(run_abuse, names[0], server.port, BAD, 0).result()  # makes the bodies
        with watch.measuring() as before:
            time.sleep(min(BASELINE_S, 2 * seconds))
        print_line(f"{'nothing':45} {before.line()}")
        for name in names:
            with watch.measuring() as during:
                found = pool.submit(run_abuse, name, server.port, BAD, seconds).result()
            print_line(f"{name:45} {during.line()}; {dict(found)}")
            factor = slack * (GREEDY_FACTOR if name == GREEDY else FIRST_TOKEN_FACTOR)
            wrong += [f"{name}: {each}" for each in _findings(before, during, found, slack, factor)]
        server.wait_until(lambda: server.sequences_in_flight() == 0, 60, "idle again")
    if server.pids("services.") != processes:
        wrong.append(f"processes were {processes}, now they are {server.pids('services.')}")
    wrong += [f"the log has: {line}" for line in server.log if _is_bad(line)]
    return wrong


def _findings(
    before: Measured, during: Measured, found: Counter[str], slack: float, factor: float
) -> Iterator[str]:
    if during.usual_livez_s > LIVEZ_S * slack or max(during.livez_s) > LIVEZ_WORST_S * slack:
        yield f"/livez waited: {during.line()}"
    usual_s = max(before.median_first_token_s, MIN_FIRST_TOKEN_S)
    if during.median_first_token_s > factor * usual_s:
        yield f"first tokens waited: {during.line()}, before: {before.line()}"
    if during.stalls > during.machine_stalls:
        yield f"the event loop stood still: {during.line()}"
    if during.failures:
        yield f"good clients failed: {dict(during.failures)}"
    yield from (each for each in found if each.startswith("WRONG"))
    if found["500"]:
        yield f"{found['500']} internal errors"


def _is_bad(line: str) -> bool:
    return "Traceback" in line or " failed (" in line or bool(re.match(r"\S+ critical ", line))


@contextmanager
def abused_server(
    directory: Path,
    model: Path | None = None,
    flags: Sequence[str] = (),
    *,
    clients: Sequence[str] = WITH_KEYS,
) -> Iterator[Server]:
    """Run a server of ``model``, or of a tiny one, for one good client and one bad."""
    if model is None:
        model = make_tiny("llama", directory / "model", max_position_embeddings=CONTEXT)
        flags = ("--chat-template", TEMPLATE, *flags)
    with serving(model, *clients, *FLAGS, *flags) as server:
        yield server


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.e2e.abuse", description=__doc__, epilog="Others: the server's."
    )
    parser.add_argument(
        "--seconds", type=float, default=10, help="seconds for each (default: %(default)g)"
    )
    parser.add_argument(
        "--slack", type=float, default=1, help="factor of all limits (default: %(default)g)"
    )
    parser.add_argument("--only", default="", help="those whose name this expression finds")
    parser.add_argument("--model", help="demo, or a directory (default: a tiny random model)")
    parser.add_argument(
        "--prompt-tokens", type=int, help="of the good client's prompts (default: short text)"
    )
    parser.add_argument("--without-keys", action="store_true", help="tell clients by address")
    options, flags = parser.parse_known_args(arguments)
    os.environ[FORKS_VARIABLE] = "0"  # stalls are measured
    names = [name for name in abuses() if re.search(options.only, name)]
    if options.without_keys and RANDOM_FRAMING in names:
        names.remove(RANDOM_FRAMING)
    clients = WITHOUT_KEYS if options.without_keys else WITH_KEYS
    model = None if options.model is None else resolve(options.model)
    with (
        tempfile.TemporaryDirectory() as directory,
        abused_server(Path(directory), model, flags, clients=clients) as server,
    ):
        tokens = options.prompt_tokens
        wrong = abuse(server, names, options.seconds, options.slack, prompt_tokens=tokens)
    print_line("\n".join([*(f"WRONG: {each}" for each in wrong), f"{len(wrong)} findings"]))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
