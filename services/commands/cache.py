"""`mlx-lm-server cache`: list, verify, clear, export and import the blocks on SSD."""

from __future__ import annotations

import argparse
import os
import shutil
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvstore import maintenance
from kvstore.directory import DirectoryInUse
from kvstore.maintenance import Outcome
from services.commands.admin_client import (
    EXIT_CODES,
    ServerRefused,
    add_json_flag,
    add_server_flags,
    administrate,
    run,
    table,
)
from services.commands.parser import CommandParser
from shared.exits import EXIT_FAILED, EXIT_OK
from shared.paths import user_path
from shared.settings import Settings

PROG = "mlx-lm-server cache"
VARIABLE = "MLX_LM_SERVER_SSD_CACHE_DIR"


def main(argv: Sequence[str]) -> int:
    """Run the command in ``argv``; return the exit code."""
    return run(PROG, parser(), argv, _act)


def _act(options: argparse.Namespace) -> tuple[int, Any, str]:
    root = user_path(str(options.ssd_cache_dir))
    if options.command == "export" and not options.file.name:
        raise ServerRefused(f"{options.file} is not a file name")
    if options.command not in ("import", "clear") and not root.is_dir():
        raise ServerRefused(f"directory {root} does not exist")
    try:
        found: tuple[int, Any, str] = _COMMANDS[options.command][0](root, options)
        return found
    except DirectoryInUse:
        hint = "use --url to clear it" if options.command == "clear" else "stop it first"
        raise ServerRefused(f"a running server uses {root}: {hint}") from None
    except tarfile.TarError as error:
        raise ServerRefused(f"{options.file} is not an archive of blocks: {error}") from None
    except OSError as error:
        raise ServerRefused(f"{error.filename or root}: {error.strerror}") from None


def _ls(root: Path, options: argparse.Namespace) -> tuple[int, Any, str]:
    found = maintenance.list_namespaces(root)
    rows: list[list[object]] = [["NAMESPACE", "BLOCKS", "MB"]]
    for name, one in sorted(found.items(), key=lambda item: -item[1].last_used):
        rows.append([name, one.blocks, f"{one.bytes / 1e6:.1f}"])
    listed = [{"namespace": name, **vars(one)} for name, one in found.items()]
    return EXIT_OK, {"namespaces": listed}, table(rows)


def _stats(root: Path, options: argparse.Namespace) -> tuple[int, Any, str]:
    found = maintenance.list_namespaces(root).values()
    figures = {
        "directory": str(root),
        "namespaces": len(found),
        "blocks": sum(one.blocks for one in found),
        "bytes": sum(one.bytes for one in found),
        "free_bytes": shutil.disk_usage(root).free,
    }
    return EXIT_OK, figures, "\n".join(f"{name:<11} {value}" for name, value in figures.items())


def _verify(root: Path, options: argparse.Namespace) -> tuple[int, Any, str]:
    return _outcome("good", maintenance.verify(root, options.namespace))


def _clear(root: Path, options: argparse.Namespace) -> tuple[int, Any, str]:
    if options.url is not None:
        if options.namespace is not None:
            raise ServerRefused("--namespace: a running server can only be cleared completely")
        done = administrate(options, "POST", "cache", "clear")
        return EXIT_OK, done, f"{done['done']}: {', '.join(done['names']) or 'no engines'}"
    return _outcome("removed", maintenance.clear(root, options.namespace))


def _export(root: Path, options: argparse.Namespace) -> tuple[int, Any, str]:
    return _outcome("exported", maintenance.export_blocks(root, options.file, options.namespace))


def _import(root: Path, options: argparse.Namespace) -> tuple[int, Any, str]:
    return _outcome("imported", maintenance.import_blocks(root, options.file))


def _outcome(verb: str, outcome: Outcome) -> tuple[int, Any, str]:
    lines = [f"{outcome.blocks} blocks {verb}, {outcome.bytes / 1e6:.1f} MB"]
    lines += [f"bad: {name}" for name in outcome.bad]
    found = {verb: outcome.blocks, "bytes": outcome.bytes, "bad": outcome.bad}
    return EXIT_FAILED if outcome.bad else EXIT_OK, found, "\n".join(lines)


_COMMANDS: dict[str, tuple[Any, str]] = {
    "ls": (_ls, "list namespaces (one model and kind of cache), most recently used first"),
    "stats": (_stats, "count all blocks"),
    "verify": (_verify, "read and verify every block; exit code 1 if one is bad"),
    "clear": (_clear, "delete blocks of a stopped server, or of a running one with --url"),
    "export": (_export, "write the blocks to a tar file"),
    "import": (_import, "add the blocks of a tar file to a stopped server"),
}


def parser() -> argparse.ArgumentParser:
    default = Settings().ssd_cache_dir
    made = CommandParser(
        prog=PROG, description="Manage the SSD tier of the prefix cache.", epilog=EXIT_CODES
    )
    commands = made.add_subparsers(metavar="COMMAND", required=True, dest="command")
    for name, (_, help) in _COMMANDS.items():
        each = commands.add_parser(name, help=help, description=help, epilog=EXIT_CODES)
        each.add_argument(
            "--ssd-cache-dir",
            type=Path,
            metavar="PATH",
            default=Path(os.environ.get(VARIABLE) or default),
            help=f"directory of the SSD tier (default: ${VARIABLE}, else {default})",
        )
        if name in ("verify", "clear", "export"):
            each.add_argument("--namespace", help="only this namespace")
        if name in ("export", "import"):
            each.add_argument("file", type=Path, metavar="FILE", help="tar file")
        if name == "clear":
            add_server_flags(each, url_help="URL of a running server, to clear it instead")
        add_json_flag(each)
    return made
