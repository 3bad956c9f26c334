"""The command line: `mlx-lm-server [COMMAND] [flags]`; the default of COMMAND is serve."""

from __future__ import annotations

import difflib
import importlib
import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from shared.exits import EXIT_OK, EXIT_USAGE, fail
from shared.version import installed_version

PROG = "mlx-lm-server"

COMMANDS = {
    "serve": ("supervision.local", "serve a model (the default)"),
    "chat": ("commands.chat.command", "talk with a model in the terminal"),
    "status": ("commands.control:status", "the state of a running server, live in a terminal"),
    "bench": ("commands.bench.command", "measure a server under load, steps, or the cache"),
    "batch": ("commands.batch.command", "answer a file of requests, in the background"),
    "models": ("commands.models.command", "models of this machine, what fits; get one with pull"),
    "doctor": ("commands.doctor.command", "say what is wrong with this set-up, and how to mend it"),
    "agent": ("commands.agent", "start a coding agent (claude, codex, opencode) on a server"),
    "completion": ("commands.completion", "print the completion of these commands for a shell"),
    "service": ("commands.service.command", "keep a server running with launchd or systemd"),
    "engines": ("commands.control:engines", "engines of a server, also those of other machines"),
    "drain": ("commands.control:drain", "give an engine, or the server, no further requests"),
    "restart": ("commands.control:restart", "restart an engine, or all one at a time"),
    "cache": ("commands.cache", "list, check, clear, export and import the blocks on SSD"),
    "keys": ("commands.keys", "make keys for tcp sockets, and say which may join"),
    "engine": ("supervision.joining", "run engines that join the routers of --engine-socket"),
    "router": ("processes.router", "serve HTTP for the engines that join at --engine-socket"),
    "kvstore": ("processes.kvstore", "keep blocks on SSD for the engines at --kvstore-socket"),
    "localai": ("localai.command", "serve as a backend of LocalAI, over gRPC"),
}
"""Name -> (module of `services` and function, by default ``main``, of ``(argv) -> int``; help).
A module is imported when it is needed. Completion calls its ``parser()``, or ``status_parser()``
where the function is ``status``."""

WITH_SETTINGS = ("serve", "doctor", "engine", "router", "kvstore")
"""Commands that take the flags of the server (`shared.settings`)."""

_WITH_THREADS = ("router",)
"""Their threads may be at work at the end, for requests that were cut: nobody waits for them."""
_HELP = ("-h", "--help", "--help-all")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that ``argv`` (default: sys.argv) names; return the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    with _readers_that_leave():
        code = _run(argv)
        sys.stdout.flush()
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
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(COMMANDS)}"
        return fail(PROG, f"unknown command {name!r}; {hint}", EXIT_USAGE)
    module, _, function = COMMANDS[name][0].partition(":")
    code: int = getattr(importlib.import_module(f"services.{module}"), function or "main")(rest)
    if name in _WITH_THREADS:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


@contextmanager
def _readers_that_leave() -> Iterator[None]:
    """End without a traceback if the reader of the output has left, as ``| head`` does, with the
    code that a shell gives a program that SIGPIPE has ended."""
    try:
        try:
            yield
        except SystemExit:  # after help, which may still be in the buffer
            sys.stdout.flush()
            raise
    except BrokenPipeError:
        # What is still in the buffer is written at the end of the interpreter.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(128 + signal.SIGPIPE) from None


def _list_commands() -> None:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {help}" for name, (_, help) in COMMANDS.items()]
    sys.stdout.write("\n".join([f"{PROG} COMMAND [flags], and COMMAND --help:", *lines, "", ""]))


if __name__ == "__main__":
    sys.exit(main())
