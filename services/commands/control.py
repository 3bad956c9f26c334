"""`mlx-lm-server status`, `engines`, `drain` and `restart`: inspect and control a
running server."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

from services.commands.admin_client import (
    EXIT_CODES,
    NoServer,
    ServerRefused,
    add_json_flag,
    add_server_flags,
    administrate,
    ask,
    run,
    table,
)
from services.commands.parser import CommandParser
from shared.exits import EXIT_FAILED, EXIT_OK

_PROG = "mlx-lm-server"
_POLL_S = 0.5
Outcome = tuple[int, Any, str]
"""The exit code, the output of --json, and the text."""


def status(argv: Sequence[str]) -> int:
    """Show the state of the server, live in a terminal. Exit code 1: the server is not ready."""
    return run(f"{_PROG} status", status_parser(), argv, _status)


def status_parser() -> argparse.ArgumentParser:
    text = "Show the state of a server, its models and engines; live in a terminal, q quits."
    parser = _parser("status", text, admin=False)
    parser.add_argument(
        "--once",
        action="store_true",
        help="print the state once, as when the output is not a terminal",
    )
    return parser


def engines(argv: Sequence[str]) -> int:
    return run(f"{_PROG} engines", engines_parser(), argv, _engines)


def engines_parser() -> argparse.ArgumentParser:
    return _parser("engines", "List a server's engines, including those on other machines.")


def drain(argv: Sequence[str]) -> int:
    return run(f"{_PROG} drain", drain_parser(), argv, _drain)


def drain_parser() -> argparse.ArgumentParser:
    parser = _parser(
        "drain", "Stop sending requests to an engine, or permanently to the whole server."
    )
    parser.add_argument("engine", nargs="?", help="engine (default: the whole server, permanently)")
    parser.add_argument("--undo", action="store_true", help="send requests to the engine again")
    parser.add_argument("--wait", action="store_true", help="wait until its requests have finished")
    return parser


def restart(argv: Sequence[str]) -> int:
    return run(f"{_PROG} restart", restart_parser(), argv, _restart)


def restart_parser() -> argparse.ArgumentParser:
    parser = _parser(
        "restart", "Restart an engine, or all engines one at a time; requests continue."
    )
    parser.add_argument("engine", nargs="?", help="engine (default: all)")
    parser.add_argument("--wait", action="store_true", help="wait until it is done")
    return parser


def _status(options: argparse.Namespace) -> Outcome:
    once = options.once or options.json
    if not once and sys.stdin.isatty() and sys.stdout.isatty():
        from services.commands.live_status import watch  # these libraries are not needed in a pipe

        return watch(options), {}, ""
    code, found = ask(options, "GET", "health")
    if not {"status", "version", "reasons", "models"} <= found.keys():
        raise NoServer(
            f"{options.url} responds with {code} to /health, but is not an mlx-lm-server"
        )
    lines = [f"{found['status']}: mlx-lm-server {found['version']} at {options.url}"]
    lines += found["reasons"]
    if (batches := found.get("batches")) and batches["unfinished"]:
        done, running = f"{batches['lines_done']}/{batches['lines']}", batches["running"]
        lines.append(f"batches: {batches['unfinished']}, {done} lines, {running} running")
    rows: list[list[object]] = [["MODEL", "ENGINE", "STATE", "SEQUENCES", "KV BLOCKS", "QUEUED"]]
    for model in found["models"]:
        if not model["engines"]:
            rows.append([model["id"], "-", model["state"], "-", "-", model["queued"]])
        for engine in model["engines"]:
            blocks = engine["blocks"]
            rows.append(
                [
                    model["id"],
                    engine["name"],
                    engine["trouble"] or "ready",
                    f"{engine['sequences']}/{engine['max_sequences']}",
                    f"{blocks['used']}/{blocks['total']}",
                    model["queued"],
                ]
            )
    if len(rows) > 1:
        lines.append(table(rows))
    return EXIT_OK if code == 200 else EXIT_FAILED, found, "\n".join(lines)


def _engines(options: argparse.Namespace) -> Outcome:
    found = administrate(options, "GET", "engines")
    rows: list[list[object]] = [["ENGINE", "MODEL", "STATE", "SEQUENCES", "KEY"]]
    for each in found["engines"]:
        state = "restarting" if each["name"] in found["restarting"] else each["trouble"] or "ready"
        key = each["key"][:12] if each["key"] else None
        sequences = f"{each['sequences']}/{each['max_sequences']}"
        rows.append([each["name"], each["model"], state, sequences, key])
    return EXIT_OK, found, table(rows)


def _drain(options: argparse.Namespace) -> Outcome:
    if options.engine is None and options.undo:
        raise ServerRefused("--undo: requires an engine; a drained server must be restarted")
    if options.engine is None:
        done = administrate(options, "POST", "drain")
        if options.wait:
            _wait(lambda: not administrate(options, "GET", "requests")["total"])
        return EXIT_OK, done, f"the server is {done['done']}, with {done['count']} requests"
    undo = {"undo": "true"} if options.undo else {}
    done = administrate(options, "POST", "engines", options.engine, "drain", **undo)
    if options.wait and not options.undo:
        _wait(lambda: not _sequences(options, options.engine))
    return EXIT_OK, done, f"{options.engine}: {done['done']}"


def _restart(options: argparse.Namespace) -> Outcome:
    path = ["restart"] if options.engine is None else ["engines", options.engine, "restart"]
    done = administrate(options, "POST", *path)
    if options.wait:
        _wait(lambda: not administrate(options, "GET", "engines")["restarting"])
    what = "restarted" if options.wait else done["done"]
    return EXIT_OK, done, f"{what}: {', '.join(done['names']) or 'none'}"


def _sequences(options: argparse.Namespace, name: str) -> int:
    found = administrate(options, "GET", "engines")["engines"]
    return sum(each["sequences"] for each in found if each["name"] == name)


def _wait(condition: Any) -> None:
    while not condition():
        time.sleep(_POLL_S)


def _parser(name: str, help: str, *, admin: bool = True) -> argparse.ArgumentParser:
    codes = EXIT_CODES if admin else "Exit codes: 0 ready, 1 not ready, 3 no server responds."
    parser = CommandParser(prog=f"{_PROG} {name}", description=help, epilog=codes)
    add_server_flags(parser, admin=admin)
    add_json_flag(parser)
    return parser
