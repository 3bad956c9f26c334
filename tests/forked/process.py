"""Processes of our modules, forked from one that has imported them all.

Imports are most of what a start costs: router, engine, kvstore and supervisor take four seconds of
CPU time for them. Here `multiprocessing`'s fork server imports them once. A process that is forked
from it runs a module as ``python -m`` does, and forks its own children. Only on Linux: programs of
macOS may crash after a fork without exec. Tests of how processes start set ``TEST_FORKS=0``.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import io
import logging
import multiprocessing
import os
import resource
import runpy
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import IO, Any, NoReturn

CAN_FORK = sys.platform == "linux"
CONTEXT: Any = multiprocessing.get_context("forkserver" if CAN_FORK else "spawn")
CONTEXT.set_forkserver_preload(["tests.forked.image"])
FORKS_VARIABLE = "TEST_FORKS"
"""Environment variable: 0 if processes have to be started as users start them, 1 if it does not
matter to them that the image was made with other values of `READ_AT_IMPORT`."""
MODULES = (
    *("mlx_lm_server", "services.supervision.local"),
    *(f"services.processes.{name}" for name in ("router", "kvstore", "engine")),
)
READ_AT_IMPORT = (
    "HF_",
    "HOME",
    "MKL_",
    "MLX_LM_SERVER_BLAS",
    "OPENBLAS_",
    "TRANSFORMERS_",
    "XDG_CACHE_",
)
"""Beginnings of variables that were read when the image was made."""
_KEPT: list[Any] = []


def may_fork(module: str, argv: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Return whether a fork is as good as a new process. Not for engines of several ranks: these
    share the cores, of which the image's BLAS has all."""
    read = {
        name
        for name in {*environ, *os.environ}
        if name.startswith(READ_AT_IMPORT) and environ.get(name) != os.environ.get(name)
    }
    words = (*argv, *environ)
    ranks = any("distributed-mode" in word.lower().replace("_", "-") for word in words)
    divided = ranks and module == "services.processes.engine"
    wanted = environ.get(FORKS_VARIABLE, "0" if read else "1") != "0"
    return wanted and CAN_FORK and module in MODULES and not divided


def start_process(
    module: str,
    argv: Sequence[str],
    environ: Mapping[str, str],
    *,
    prefix: Sequence[str] = (),
    directory: Path | None = None,
) -> subprocess.Popen[str] | ForkedProcess:
    """Start ``python -m module``, whose output can be read. With a ``prefix``, a command that runs
    the rest of its arguments, and where a fork would make a difference, nothing is forked."""
    if not prefix and may_fork(module, argv, environ):
        return ForkedProcess.piped(module, argv, environ)
    return subprocess.Popen(
        [*prefix, sys.executable, "-m", module, *argv],
        cwd=directory,
        env=dict(environ),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


class ForkedProcess:
    """Has those parts of `subprocess.Popen` that tests need."""

    def __init__(
        self,
        module: str,
        argv: Sequence[str],
        environ: Mapping[str, str],
        output: int,
        max_descriptors: int | None = None,
    ) -> None:
        """Both of its streams go to the descriptor ``output``."""
        self.stdout: IO[str] | None = None
        arguments = (module, list(argv), dict(environ), _Descriptor(output), max_descriptors)
        self._process = CONTEXT.Process(target=_run, args=arguments, daemon=True)
        self._process.start()

    @classmethod
    def piped(cls, module: str, argv: Sequence[str], environ: Mapping[str, str]) -> ForkedProcess:
        """Start a process whose output can be read from ``stdout``."""
        reader, writer = os.pipe()
        process = cls(module, argv, environ, writer)
        os.close(writer)
        process.stdout = os.fdopen(reader)
        return process

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return int(self._process.pid)

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        code: int | None = self._process.exitcode
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired("a forked process", timeout or 0)
        return code


class _Descriptor:
    """A descriptor that is sent along with the arguments of a process, which get its number."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (DupFd(self._number),)


def _received(sent: Any) -> int:
    return int(sent.detach())


def _run(
    module: str,
    argv: Sequence[str],
    environ: Mapping[str, str],
    output: int,
    max_descriptors: int | None,
) -> NoReturn:
    if max_descriptors is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max_descriptors, max_descriptors))
    subprocess.Popen = _ForkingPopen  # type: ignore[misc]
    _become(module, argv, environ, (0, output, output), kept=())


class _ForkingPopen(subprocess.Popen[Any]):
    """Forks a process of `MODULES` from this one."""

    def _execute_child(self, args: Any, *rest: Any) -> None:
        _, _, _, kept, directory, environ, *_ = rest
        words = list(args) if isinstance(args, (list, tuple)) else []
        module, argv = _module_of(words)
        environ = dict(os.environ if environ is None else environ)
        if module is None or directory is not None or not may_fork(module, argv, environ):
            super()._execute_child(args, *rest)  # type: ignore[misc]
            return
        pipes, group = rest[9:15], rest[-1]
        p2cread, _, _, c2pwrite, _, errwrite = pipes
        self.pid = os.fork()
        if self.pid == 0:
            if rest[-2]:
                os.setsid()
            if group >= 0:
                os.setpgid(0, group)
            streams = (max(p2cread, 0), max(c2pwrite, 1), max(errwrite, 2))
            _become(module, argv, environ, streams, kept)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def _module_of(words: Sequence[Any]) -> tuple[str | None, Sequence[str]]:
    """Return the module that a command runs, and its arguments."""
    for options in (("-P", "-m"), ("-m",)):
        end = 1 + len(options)
        if tuple(words[:end]) == (sys.executable, *options) and len(words) > end:
            return str(words[end]), words[end + 1 :]
    return None, ()


def _become(
    module: str,
    argv: Sequence[str],
    environ: Mapping[str, str],
    streams: tuple[int, int, int],
    kept: Sequence[int],
) -> NoReturn:
    """Run a module in this process, which has just been forked, and exit."""
    code = 1
    try:
        # What the parent had opened stays referenced, so nothing closes these numbers again.
        gc.freeze()
        _KEPT.extend((sys.stdin, sys.stdout, sys.stderr))
        _reset(streams, kept)
        os.environ.clear()
        os.environ.update(environ)
        _rename([sys.executable, "-P", "-m", module, *argv])
        _read_again(module)
        sys.argv = [module, *argv]
        sys.modules.pop(module, None)  # which runpy warns of
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _reset(streams: tuple[int, int, int], kept: Sequence[int]) -> None:
    """Have the descriptors, signals and hooks of a new process."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for target, descriptor in enumerate(streams):
        os.dup2(descriptor, target)
    for descriptor in [int(path.name) for path in Path("/dev/fd").iterdir()]:
        if descriptor > 2 and descriptor not in kept:
            try:
                os.close(descriptor)
            except OSError:
                pass  # that of the listing
    sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False))
    for name, target in (("stdout", 1), ("stderr", 2)):
        stream = io.TextIOWrapper(io.FileIO(target, "w", closefd=False), line_buffering=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    atexit._clear()
    logging.root.handlers.clear()
    logging.root.setLevel(logging.WARNING)


def _read_again(module: str) -> None:
    """The router sets a variable before it imports what reads it."""
    constants = sys.modules.get("huggingface_hub.constants")
    if constants is not None and module == "services.processes.router":
        constants.HF_HUB_OFFLINE = True  # type: ignore[attr-defined]


def _rename(words: Sequence[str]) -> None:
    """Be listed with this command line, as far as there is room for it."""
    if not CAN_FORK:
        return
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    first, end = int(fields[45]), int(fields[46])
    data = b"\0".join(map(os.fsencode, words))[: end - first - 1]
    ctypes.memmove(first, data.ljust(end - first, b"\0"), end - first)
