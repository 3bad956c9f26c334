"""`mlx-lm-server completion SHELL`: a shell script that completes commands, flags and files.

The script is generated from the parsers of all commands, so that nothing runs while a user types.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterator, Sequence

import shtab

from services.commands.cli import COMMANDS, PROG, WITH_SETTINGS
from services.commands.parser import CommandParser
from shared.exits import EXIT_OK
from shared.settings import flag_parser

SHELLS = ("bash", "zsh", "fish")
_HOW = f"""To enable completion in every new shell:
  bash   echo 'eval "$({PROG} completion bash)"' >> ~/.bashrc
  zsh    {PROG} completion zsh > "${{fpath[1]}}/_{PROG}"
  fish   {PROG} completion fish > ~/.config/fish/completions/{PROG}.fish"""
_FILES = ("PATH", "FILE")
"""Names of flags and arguments that take a file or folder."""


def main(argv: Sequence[str]) -> int:
    """Print the script; return the exit code."""
    options = parser().parse_args(argv)
    sys.stdout.write(shtab.complete(whole_parser(), options.shell) + "\n")
    return EXIT_OK


def parser() -> argparse.ArgumentParser:
    made = CommandParser(
        prog=f"{PROG} completion",
        description="Print a shell completion script.",
        epilog=_HOW,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))
    return made


def whole_parser() -> argparse.ArgumentParser:
    """Return one parser of all commands. Without a command, the flags are those of serve."""
    root = argparse.ArgumentParser(prog=PROG, parents=[flag_parser(PROG)], add_help=False)
    root.add_argument("--version", action="store_true", help="print the version")
    commands = root.add_subparsers(metavar="COMMAND")
    for name, (_, help) in COMMANDS.items():
        commands.add_parser(name, help=help, parents=[_parser_of(name)], add_help=False)
    for action in _actions(root):
        if action.metavar in _FILES:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    return root


def _parser_of(name: str) -> argparse.ArgumentParser:
    if name in WITH_SETTINGS:
        return flag_parser(f"{PROG} {name}")
    module, _, function = COMMANDS[name][0].partition(":")
    maker = f"{function}_parser" if function else "parser"
    made: argparse.ArgumentParser = getattr(importlib.import_module(f"services.{module}"), maker)()
    return made


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield the flags and arguments of ``parser`` and its commands. (argparse has no public list of
    them; shtab reads the same attributes.)"""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from _actions(each)
