"""The command-line parser. ``--help`` shows the common flags, ``--help-all`` all of them."""

from __future__ import annotations

import argparse
import shutil
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from shared.flags.declaration import Flag, FlagError

_WIDEST = 100


class FlagParser(argparse.ArgumentParser):
    """Parses the flags. Raises `FlagError` for errors."""

    def error(self, message: str) -> NoReturn:
        raise FlagError(message.removeprefix("argument "))


class _HelpFormatter(argparse.HelpFormatter):
    """Uses the width of the terminal, and never breaks a flag or file name at a hyphen."""

    def __init__(self, prog: str) -> None:
        columns = shutil.get_terminal_size().columns
        super().__init__(prog, max_help_position=30, width=max(40, min(_WIDEST, columns - 1)))

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False, break_long_words=False)


class _PrintHelp(argparse.Action):
    def __init__(self, *, page: argparse.ArgumentParser | None, **options: Any) -> None:
        super().__init__(**options, nargs=0)
        self._page = page

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        sys.stdout.write((self._page or parser).format_help())
        parser.exit()


def argument_parser(
    flags: Sequence[Flag], prog: str, description: str, common: Sequence[str] = ()
) -> FlagParser:
    """Return the parser of ``flags``. Its ``--help`` shows the ``common`` ones, or all if none are
    given.
    """
    short = None
    if common:
        short = _empty_parser(prog, description)
        short.epilog = (
            f"--help-all shows all {len(flags)} flags. Each can also be set by an environment "
            "variable (--max-batch-size: $MLX_LM_SERVER_MAX_BATCH_SIZE) or a key in the "
            "--config file."
        )
        group = short.add_argument_group("common flags")
        by_name = {flag.name: flag for flag in flags}
        for name in common:
            _add(group, by_name[name], _short_help(by_name[name]))
    parser = _empty_parser(prog, description)
    group = parser.add_argument_group("help")
    group.add_argument("-h", "--help", action=_PrintHelp, page=short, help="show the common flags")
    group.add_argument("--help-all", action=_PrintHelp, page=None, help="show all flags")
    groups: dict[str, Any] = {}
    for flag in flags:
        if flag.group not in groups:
            groups[flag.group] = parser.add_argument_group(flag.group)
        _add(groups[flag.group], flag, _help(flag))
    return parser


def _empty_parser(prog: str, description: str) -> FlagParser:
    return FlagParser(
        prog=prog,
        description=description,
        usage=f"{prog} [flags]",
        add_help=False,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=_HelpFormatter,
    )


def _add(group: Any, flag: Flag, help: str) -> None:
    options: dict[str, Any] = {"dest": flag.field, "help": help.replace("%", "%%")}
    if flag.kind is bool:
        group.add_argument(f"--{flag.name}", action="store_const", const=True, **options)
        options["help"] = argparse.SUPPRESS if flag.name.startswith("no-") else "the opposite"
        group.add_argument(f"--{flag.opposite}", action="store_const", const=False, **options)
        return
    metavar = "{" + ",".join(map(str, flag.choices)) + "}" if flag.choices else _metavar(flag)
    action = "append" if flag.kind is tuple else "store"
    group.add_argument(f"--{flag.name}", action=action, metavar=metavar, **options)


def _help(flag: Flag) -> str:
    also = "".join(f", ${name}" for name in flag.declared.variables)
    later = " [not available yet]" if flag.declared.later else ""
    return f"{_meaning(flag)} (default: {flag.shown_default}; ${flag.variable}{also}){later}"


def _short_help(flag: Flag) -> str:
    return f"{_meaning(flag)} (default: {flag.shown_default})"


def _meaning(flag: Flag) -> str:
    return flag.declared.help + ("; repeatable" if flag.kind is tuple else "")


def _metavar(flag: Flag) -> str:
    return {int: "N", float: "X", Path: "PATH", dict: "JSON"}.get(flag.kind, "TEXT")
