"""`mlx-lm-server bench NAME`: runs the measurement of that name."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from types import ModuleType

from services.commands.parser import CommandParser
from shared.settings import flag_parser

BENCHES = {
    "serve": "load on any server with OpenAI's API: throughput, time to first token, goodput",
    "kv": "time to first token with a prefix computed, in RAM, or on SSD",
    "plot": "one plot of several results of `bench serve --save`",
}
"""Name (a module of this package) and help."""


WITH_SETTINGS = ("kv",)
"""Measurements that also take the server's flags."""

_WITH_PARSER = {"serve": "options"}
"""The module of its parser, if that is another one."""


def main(argv: Sequence[str]) -> int:
    """Run the measurement named in ``argv``; return its exit code."""
    made = _empty_parser()
    made.add_argument("name", choices=list(BENCHES), metavar="NAME", help=", ".join(BENCHES))
    name = made.parse_args(argv[:1]).name
    code: int = _module(name).main(argv[1:])
    return code


def parser() -> argparse.ArgumentParser:
    """Return the parser for completion, with the flags of all measurements."""
    made = _empty_parser()
    commands = made.add_subparsers(metavar="NAME")
    for name, help in BENCHES.items():
        make_parser = _module(_WITH_PARSER.get(name, name)).make_parser
        flags = make_parser(flag_parser(made.prog)) if name in WITH_SETTINGS else make_parser()
        commands.add_parser(name, help=help, parents=[flags], add_help=False)
    return made


def _empty_parser() -> argparse.ArgumentParser:
    return CommandParser(
        prog="mlx-lm-server bench",
        description="Run a benchmark. Each has its own --help; docs/bench.md defines the figures.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(f"  {name:<7}{help}" for name, help in BENCHES.items()),
    )


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"services.commands.bench.{name}")
