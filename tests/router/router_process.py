"""The router as a process.

Imports are most of a start, so on Linux a process that has imported the router is forked for each.
`tests.router.http.test_process` starts some as users do.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

if sys.platform == "linux":
    CONTEXT = multiprocessing.get_context("forkserver")
else:  # programs of macOS may crash after a fork without exec
    CONTEXT = multiprocessing.get_context("spawn")
CONTEXT.set_forkserver_preload(["services.processes.router"])


def serve(
    argv: Sequence[str], log: Path, environ: Mapping[str, str], max_descriptors: int | None
) -> None:
    from services.processes.router import main

    if max_descriptors is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max_descriptors, max_descriptors))

    with log.open("w") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    os.environ.clear()
    os.environ.update(environ)
    code = 1
    try:
        code = main(argv)
    except SystemExit as error:
        code = int(error.code or 0)
    finally:
        logging.shutdown()
        os._exit(code)


class RouterProcess:
    """Has those parts of `subprocess.Popen` that tests need."""

    def __init__(self, argv: Sequence[str], log: Path, max_descriptors: int | None = None) -> None:
        log.touch()
        environ = {k: v for k, v in os.environ.items() if not k.startswith("MLX_LM_SERVER_")}
        self._process = CONTEXT.Process(
            target=serve, args=(argv, log, environ, max_descriptors), daemon=True
        )
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout_s: float | None = None) -> int:
        self._process.join(timeout_s)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("router", timeout_s or 0)
        return self._process.exitcode
