"""The command line: `mlx-lm-server [COMMAND] [flags]`; the default of COMMAND is serve."""

from __future__ import annotations

import difflib
import importlib
import logging
import os
import sys
from collections.abc import Sequence

from shared.exits import EXIT_OK, EXIT_USAGE, fail
from shared.version import installed_version

PROG = "mlx-lm-server"

COMMANDS = {
    "serve": ("services.local", "serve a model (the default)"),
    "engine": ("services.joining", "run engines that join the routers of --engine-socket"),
    "router": ("services.router", "serve HTTP for the engines that join at --engine-socket"),
    "kvstore": ("services.kvstore", "keep blocks on SSD for the engines at --kvstore-socket"),
    "keys": ("services.keys", "make keys for tcp sockets, and say which may join"),
    "status": ("services.control:status", "the state of a running server"),
    "engines": ("services.control:engines", "its engines, also those of other machines"),
    "drain": ("services.control:drain", "give an engine, or the server, no further requests"),
    "restart": ("services.control:restart", "restart an engine, or all one at a time"),
    "cache": ("services.cache", "list, check, clear, export and import the blocks on SSD"),
    "service": ("services.service", "keep a server running with launchd or systemd"),
    "localai": ("services.localai", "serve as a backend of LocalAI, over gRPC"),
    "agent": ("services.agent", "start a coding agent (claude, codex, opencode) on a server"),
    "bench": ("services.benchmark.command", "measure a server under load, steps, or the cache"),
    "doctor": ("services.doctor", "say what is found on this machine, and what is missing"),
}
"""Name -> (module and function, by default ``main``, of ``(argv) -> int``; help). A module is
imported when it is needed."""


_WITH_THREADS = ("router",)
"""Their threads may be at work at the end, for requests that were cut: nobody waits for them."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that ``argv`` (default: sys.argv) names; return the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] == ["--version"]:
        sys.stdout.write(f"{PROG} {installed_version()}\n")
        return EXIT_OK
    if not argv or argv[0].startswith("-"):
        if argv and argv[0] in ("-h", "--help"):
            _list_commands()
        argv.insert(0, "serve")
    name, *rest = argv
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(COMMANDS)}"
        return fail(PROG, f"unknown command {name!r}; {hint}", EXIT_USAGE)
    module, _, function = COMMANDS[name][0].partition(":")
    code: int = getattr(importlib.import_module(module), function or "main")(rest)
    if name in _WITH_THREADS:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _list_commands() -> None:
    sys.stdout.write("commands:\n")
    for name, (_, help) in COMMANDS.items():
        sys.stdout.write(f"  {name:<8}{help}\n")
    sys.stdout.write("\n")


if __name__ == "__main__":
    sys.exit(main())
