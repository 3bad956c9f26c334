"""The command line: `mlx-lm-server [COMMAND] [flags]`; COMMAND defaults to serve."""

from __future__ import annotations

import difflib
import errno
import importlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from services.supervision.bounded_log import LAUNCHD_LOG_VARIABLE
from shared.exits import EXIT_CONFIG, EXIT_FAILED, EXIT_OK, EXIT_USAGE, fail
from shared.version import installed_version

PROG = "mlx-lm-server"

COMMANDS = {
    "serve": ("supervision.local", "serve a model (the default)"),
    "chat": ("commands.chat.command", "chat with a model in the terminal"),
    "decide": ("commands.decide", "ask typed questions about a text, answered with probabilities"),
    "status": ("commands.control:status", "show the state of a running server, live in a terminal"),
    "bench": ("commands.bench.command", "benchmark a server, or the cache"),
    "batch": ("commands.batch.command", "process a file of requests in the background"),
    "models": ("commands.models.command", "list, inspect and download models"),
    "doctor": ("commands.doctor.command", "check this setup and suggest fixes"),
    "agent": ("commands.agent", "start a coding agent (claude, codex, opencode) on a server"),
    "completion": ("commands.completion", "print a shell completion script"),
    "service": ("commands.service.command", "run a server as a launchd or systemd service"),
    "engines": (
        "commands.control:engines",
        "list a server's engines, including those on other machines",
    ),
    "drain": ("commands.control:drain", "stop sending requests to an engine or the whole server"),
    "restart": ("commands.control:restart", "restart an engine, or all engines one at a time"),
    "cache": ("commands.cache", "list, verify, clear, export and import the blocks on SSD"),
    "keys": ("commands.keys", "create keys for tcp sockets, and manage who may join"),
    "engine": ("supervision.joining", "run engines that join the routers at --engine-socket"),
    "router": ("processes.router", "run a router for engines that join at --engine-socket"),
    "kvstore": ("processes.kvstore", "run an SSD cache for the engines at --kvstore-socket"),
    "localai": ("localai.command", "run as a LocalAI backend, over gRPC"),
}
"""Name -> (module of `services` and function, by default ``main``, of ``(argv) -> int``; help).
Modules are imported on demand. Completion calls the module's ``parser()``, or ``status_parser()``
if the function is ``status``."""

WITH_SETTINGS = ("serve", "doctor", "engine", "router", "kvstore")
"""Commands that take the flags of the server (`shared.settings`)."""

_WITH_THREADS = ("router",)
"""Commands whose threads may still be working on cancelled requests at the end: do not wait for
them."""
_HELP = ("-h", "--help", "--help-all")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command named in ``argv`` (default: sys.argv); return the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if os.getpid() == 1:  # of a container, where a signal without a handler is ignored
        signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))
    _open_closed_streams()
    try:
        with _lost_outputs():
            code = _run(argv)
            sys.stdout.flush()
    except KeyboardInterrupt:  # while a command imports its modules, or a server ends
        return 128 + signal.SIGINT
    return code


def _run(argv: list[str]) -> int:
    if argv[:1] == ["--version"]:
        sys.stdout.write(f"{PROG} {installed_version()}\n")
        return EXIT_OK
    if not argv or argv[0].startswith("-"):
        if argv and argv[0] in _HELP:
            _list_commands()
        argv.insert(0, "serve")
    name, *rest = argv
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"the commands are {', '.join(COMMANDS)}"
        return fail(PROG, f"unknown command {name!r}; {hint}", EXIT_USAGE)
    module, _, function = COMMANDS[name][0].partition(":")
    run = getattr(importlib.import_module(f"services.{module}"), function or "main")
    code: int = (
        run(rest) if LAUNCHD_LOG_VARIABLE not in os.environ else _without_restarts(run, rest)
    )
    if name in _WITH_THREADS:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _without_restarts(run: Callable[[list[str]], int], arguments: list[str]) -> int:
    """Return the exit code of a service of launchd, which restarts it after any code but 0."""
    try:
        code = run(arguments)
    except SystemExit as ended:
        if ended.code not in (EXIT_USAGE, EXIT_CONFIG):
            raise
        return EXIT_OK
    return EXIT_OK if code in (EXIT_USAGE, EXIT_CONFIG) else code


def _open_closed_streams() -> None:
    """Open the streams that were closed at start, as with ``>&-``: they are None, and the next
    files to be opened would get their numbers."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(opened, True)
            setattr(sys, name, os.fdopen(opened, "w" if number else "r"))


@contextmanager
def _lost_outputs() -> Iterator[None]:
    """Exit without a traceback if the reader of the output is gone, as with ``| head``, with the
    exit code that a shell gives a program killed by SIGPIPE; or if the disk of the output is
    full."""
    try:
        try:
            yield
        except SystemExit:  # help may still be in the buffer
            sys.stdout.flush()
            raise
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        # Otherwise the interpreter would write the buffer at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno == errno.EPIPE:
            raise SystemExit(128 + signal.SIGPIPE) from None
        raise SystemExit(fail(PROG, f"cannot write: {error.strerror}", EXIT_FAILED)) from None


def _list_commands() -> None:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {help}" for name, (_, help) in COMMANDS.items()]
    sys.stdout.write("\n".join([f"{PROG} COMMAND [flags], and COMMAND --help:", *lines, "", ""]))


if __name__ == "__main__":
    sys.exit(main())
