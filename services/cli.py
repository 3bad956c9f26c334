"""The command line: `mlx-lm-server [COMMAND] [flags]`; the default of COMMAND is serve."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Sequence

from shared.exits import EXIT_OK, EXIT_USAGE, fail
from shared.version import installed_version

PROG = "mlx-lm-server"

COMMANDS = {
    "serve": ("services.local", "serve a model (the default)"),
    "agent": ("services.agent", "start a coding agent (claude, codex, opencode) on a server"),
    "doctor": ("services.doctor", "say what is found on this machine, and what is missing"),
}
"""Name -> (module with ``main(argv) -> int``, help). A module is imported when it is needed."""


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
    code: int = importlib.import_module(COMMANDS[name][0]).main(rest)
    return code


def _list_commands() -> None:
    sys.stdout.write("commands:\n")
    for name, (_, help) in COMMANDS.items():
        sys.stdout.write(f"  {name:<8}{help}\n")
    sys.stdout.write("\n")


if __name__ == "__main__":
    sys.exit(main())
