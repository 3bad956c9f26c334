"""The engine's IO thread, in a process whose main thread can be made to hang."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
import zmq

from shared import wire
from shared.exits import EXIT_OK, EXIT_STUCK
from tests.engine.io.thread_process import HELLO, submit

STALL_S = 1.0
DRAIN_S = 1.0
PATIENCE_S = 90.0

Kind = TypeVar("Kind", bound=wire.Message)


class Engine:
    """The process, and the router's end of its socket."""

    def __init__(self, directory: Path) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._directory = directory
        self._socket = self.bind("engines")
        endpoint = ",".join(f"ipc://{directory}/{name}" for name in ("engines", "others"))
        self.tokenizer = directory / "tokenizer.json"
        self.tokenizer.write_text("the tokenizer")
        self._log = directory / "log"
        arguments = [endpoint, str(STALL_S), str(DRAIN_S), str(self.tokenizer)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.engine.io.thread_process", *arguments],
            cwd=Path(__file__).parents[3],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log.open("w"),
            text=True,
        )
        assert self._line() == "started"
        self.peer = b""
        self.hear(wire.Heartbeat)

    def bind(self, name: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(f"ipc://{self._directory}/{name}")
        return socket

    @contextmanager
    def as_other_router(self) -> Iterator[None]:
        """Be the engine's other router, which comes and goes."""
        mine, self._socket = (self._socket, self.peer), self.bind("others")
        try:
            self.hear(wire.Heartbeat)
            yield
        finally:
            self._socket.close()
            self._socket, self.peer = mine

    def command(self, command: str) -> str:
        """Make the main thread run ``command``; return its answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return self._line()

    def take_until(self, word: str) -> list[str]:
        """Make the main thread take messages until one of them is ``word``; return all."""
        taken: list[str] = []
        while word not in taken:
            taken += self.command("take").split()
        return taken

    def serve(self) -> None:
        """Tell the engine that its model is loaded."""
        self.command("introduce")
        self.command("phase ready")

    def send(self, message: wire.Message) -> None:
        self.send_raw(*wire.encode(message))

    def send_raw(self, *frames: Any) -> None:
        self._socket.send_multipart([self.peer, *frames])

    def hear(self, kind: type[Kind]) -> Kind:
        """Return the next message of ``kind``; skip others."""
        return self.hear_with_frames(kind)[0]

    def hear_with_frames(self, kind: type[Kind]) -> tuple[Kind, list[bytes]]:
        deadline = time.monotonic() + PATIENCE_S
        while self._socket.poll(max(0, int(1000 * (deadline - time.monotonic())))):
            self.peer, *frames = self._socket.recv_multipart()
            message, payload = wire.decode(frames, wire.ToRouter)
            if isinstance(message, kind):
                return message, payload
        raise AssertionError(f"no {kind.__name__}: {self.log}")

    def hears_no(self, kind: type[wire.Message], heartbeats: int = 2) -> bool:
        """Return whether no message of ``kind`` arrives within so many heartbeats."""
        while heartbeats:
            message = self.hear(wire.Message)
            if isinstance(message, kind):
                return False
            heartbeats -= isinstance(message, wire.Heartbeat)
        return True

    def signal(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def ends(self) -> int:
        return self.process.wait(PATIENCE_S)

    def lives_for(self, seconds: float) -> bool:
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return True
        return False

    @property
    def log(self) -> str:
        return self._log.read_text()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        self._socket.close()
        self._context.term()

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


@pytest.fixture
def engine(socket_dir: Path) -> Iterator[Engine]:
    engine = Engine(socket_dir)
    yield engine
    engine.close()


@pytest.fixture
def serving(engine: Engine) -> Engine:
    engine.serve()
    return engine


# -- stalls ----------------------------------------------------------------------


@pytest.mark.parametrize("taken", [True, False], ids=["with requests", "taking no messages"])
def test_an_engine_ends_itself_if_its_main_thread_hangs(serving: Engine, taken: bool) -> None:
    began = time.monotonic()
    if taken:
        serving.command("live")
    else:
        serving.send(submit())
    assert serving.ends() == EXIT_STUCK
    assert STALL_S < time.monotonic() - began < STALL_S + 60
    assert "requests wait, but nothing was computed" in serving.log


def test_heartbeats_report_the_seconds_without_progress(serving: Engine) -> None:
    serving.send(submit())
    assert serving.command("take") == "Submit:r"
    serving.command("live")
    while (heartbeat := serving.hear(wire.Heartbeat)).stalled_s < STALL_S / 4:
        pass
    assert heartbeat.stalled_s <= STALL_S
    assert heartbeat.phase == "ready"
    assert heartbeat.live[0].request_id == "r"


def test_the_time_before_a_request_came_is_no_stall(serving: Engine) -> None:
    while serving.hear(wire.Heartbeat).phase != "ready":
        pass
    time.sleep(0.5)  # the thread sleeps between heartbeats
    sent = time.monotonic()
    serving.send(submit())
    assert serving.hear(wire.Heartbeat).stalled_s <= time.monotonic() - sent


def test_loading_and_warming_are_not_stalls_and_end_at_the_first_signal(engine: Engine) -> None:
    engine.command("live")
    for phase in ("loading", "warming"):
        engine.command(f"phase {phase}")
        assert engine.lives_for(2 * STALL_S), phase
        while engine.hear(wire.Heartbeat).phase != phase:
            pass
    engine.signal()
    assert engine.ends() == EXIT_OK


def test_an_idle_engine_and_a_computing_one_are_not_stuck(serving: Engine) -> None:
    assert serving.lives_for(1.5 * STALL_S)
    serving.send(submit())
    assert serving.command("take") == "Submit:r"
    serving.command("live")
    for _ in range(10):
        serving.command("progress")
        assert serving.lives_for(STALL_S / 4)
    serving.command("idle")
    assert serving.lives_for(1.5 * STALL_S)


# -- signals ---------------------------------------------------------------------


def test_a_signal_drains_an_engine_whose_main_thread_is_busy_and_a_second_ends_it(
    serving: Engine,
) -> None:
    serving.signal()
    assert serving.command("take") == "Drain"
    assert serving.process.poll() is None
    serving.signal()
    assert serving.ends() == EXIT_OK
    assert "draining took" not in serving.log


def test_an_engine_ends_if_draining_takes_too_long(serving: Engine) -> None:
    serving.signal()
    assert serving.command("take") == "Drain"
    assert serving.ends() == EXIT_OK
    assert "draining took longer than 1 s" in serving.log


# -- routers ---------------------------------------------------------------------


def test_two_routers_have_their_own_requests_and_one_that_restarts_loses_only_its_own(
    serving: Engine,
) -> None:
    serving.send(wire.Ping(router_id="mine"))
    serving.hear(wire.Hello)
    serving.send(submit("a"))
    with serving.as_other_router():
        serving.send(wire.Ping(router_id="other"))
        serving.hear(wire.Hello)
        serving.send(submit("b"))
        serving.send(wire.Abort(request_id="a", attempt=3))  # of the first router
        assert "Abort" not in serving.take_until("Submit:b")
        serving.command("live a b")
        while not (heartbeat := serving.hear(wire.Heartbeat)).live:
            pass
        assert [one.request_id for one in heartbeat.live] == ["b"]
        serving.command("tokens a b")
        assert [delta.request_id for delta in serving.hear(wire.Tokens).deltas] == ["b"]
        serving.command("progress")
        serving.send(wire.Ping(router_id="other, again"))
        serving.hear(wire.Hello)
        assert serving.command("take") == "NewRouter:b"
        serving.command("progress")
        serving.command("tokens a b")
        serving.send(wire.Ping(router_id="other, again"))
        while not isinstance(heard := serving.hear(wire.Message), wire.Hello):
            assert not isinstance(heard, wire.Tokens)
    for _ in range(2):
        assert [delta.request_id for delta in serving.hear(wire.Tokens).deltas] == ["a"]


def test_the_main_thread_is_told_of_another_router_and_not_of_the_same_one(serving: Engine) -> None:
    for router_id in ("one", "one", "two"):
        serving.send(wire.Ping(router_id=router_id))
        assert serving.hear(wire.Hello) == HELLO
    serving.send(wire.Abort(request_id="last", attempt=0))
    assert serving.take_until("Abort") == ["NewRouter:", "NewRouter:", "Abort"]
    assert "new router" in serving.log


def test_a_loading_engine_refuses_requests_and_answers_a_ping_when_it_is_loaded(
    engine: Engine,
) -> None:
    engine.send(wire.Ping(router_id="one"))
    assert engine.hears_no(wire.Hello)
    for sent in (submit(), wire.Encode(request_id="texts", attempt=1, token_ids=[[1]])):
        engine.send(sent)
        heard = engine.hear(wire.Refused)
        found = heard.request_id, heard.attempt, heard.reason
        assert found == (sent.request_id, sent.attempt, "full")
    engine.command("introduce")
    assert engine.hear(wire.Hello) == HELLO


def test_files_of_the_tokenizer_are_sent_as_they_were_loaded_and_each_once(serving: Engine) -> None:
    names = ["tokenizer.json", "../log", "/etc/passwd", "config.json", *["tokenizer.json"] * 9]
    serving.tokenizer.unlink()
    for _ in range(2):
        serving.send(wire.FilesWanted(names=names))
        files, contents = serving.hear_with_frames(wire.Files)
        assert (files.names, contents) == (["tokenizer.json"], [b"the tokenizer"])
        serving.tokenizer.write_text("that of another revision")
    serving.command("lose")  # it cannot be read any more
    serving.send(wire.FilesWanted(names=names))
    assert serving.hear(wire.Files).names == []
    assert "cannot read a file of the model any more" in serving.log
    assert serving.lives_for(0.2)


def test_rubbish_is_counted_and_dropped(serving: Engine) -> None:
    rubbish = [b"", b"\xc1", b"\x00" * 100, os.urandom(1000), b"\x91" * 100_000]
    for frame in rubbish:
        serving.send_raw(frame)
    while serving.hear(wire.Heartbeat).stats.dropped_messages_total < len(rubbish):
        pass
    serving.send(wire.Ping(router_id="one"))
    assert serving.hear(wire.Hello) == HELLO
    assert "dropped an invalid message" in serving.log
