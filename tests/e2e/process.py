"""Single processes of a server, started one by one as an operator would start them."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.e2e.server import RANKS_VARIABLE
from tests.forked.process import start_process

ROOT = Path(__file__).parents[2]
PATIENCE_S = 90.0


class Process:
    """A running process. ``log`` holds the lines that it has printed so far."""

    def __init__(
        self, module: str, *flags: str, prefix: Sequence[str] = (), **environment: str
    ) -> None:
        """``prefix`` is a command that runs the rest of its arguments."""
        outside = {k: v for k, v in os.environ.items() if not k.startswith("MLX_LM_SERVER_")}
        environ = {**outside, **_of_ranks(), **environment}
        self.popen = start_process(module, flags, environ, prefix=prefix, directory=ROOT)
        self.log: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.popen.stdout is not None
        self.log.extend(line.rstrip("\n") for line in self.popen.stdout)

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Wait for a line of the log that matches, and return the match."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            for line in list(self.log):
                if match := re.search(pattern, line):
                    return match
            ended = self.popen.poll() is not None
            assert not ended and time.monotonic() < deadline, "\n".join(self.log)
            time.sleep(0.02)

    @property
    def is_running(self) -> bool:
        return self.popen.poll() is None


def wait_until(condition: Callable[[], bool], *processes: Process) -> float:
    """Return the seconds until ``condition`` is true. If that takes too long, fail with the ends of
    the logs of ``processes``."""
    began = time.monotonic()
    while not condition():
        logs = "\n".join(line for process in processes for line in process.log[-30:])
        assert time.monotonic() < began + PATIENCE_S, f"not true in time\n{logs}"
        time.sleep(0.05)
    return time.monotonic() - began


def _of_ranks() -> dict[str, str]:
    """Return settings for engines of as many ranks as the tests are about."""
    ranks = os.environ.get(RANKS_VARIABLE)
    if ranks is None:
        return {}
    return {
        "MLX_LM_SERVER_DISTRIBUTED_MODE": "ring",
        "MLX_LM_SERVER_NUM_LOCAL_RANKS": ranks,
    }


@contextmanager
def running_process(
    module: str, *flags: str, prefix: Sequence[str] = (), **environment: str
) -> Iterator[Process]:
    """Run a process, and fail unless it ends cleanly on SIGTERM or was killed before."""
    process = Process(module, *flags, prefix=prefix, **environment)
    try:
        yield process
        if process.is_running:
            process.popen.send_signal(signal.SIGTERM)
        code = process.popen.wait(PATIENCE_S)
        assert code in (0, -signal.SIGKILL), (module, code, process.log[-20:])
    finally:
        if process.is_running:
            process.popen.kill()
            process.popen.wait()
