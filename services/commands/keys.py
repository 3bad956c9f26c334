"""`mlx-lm-server keys`: the CURVE keys of processes that connect over tcp, and the allow list."""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from services.commands.admin_client import (
    EXIT_CODES,
    EXIT_NO_SERVER,
    NoServer,
    ServerRefused,
    add_server_flags,
    administrate,
)
from services.commands.parser import CommandParser
from shared.exits import EXIT_FAILED, EXIT_OK, fail
from shared.network.allow_list import (
    AllowedKey,
    AllowListError,
    parse_allowed_key,
    read_allow_list,
    write_allow_list,
)
from shared.network.curve import (
    ALLOW_LIST,
    CurveError,
    Role,
    check_free,
    create_pair,
    is_key,
    load_public,
)
from shared.paths import user_path

PROG = "mlx-lm-server keys"
VARIABLE = "MLX_LM_SERVER_CURVE_DIR"
_NATIVE = "native"
"""The name of the engines that have the keys beside those of the server."""


def main(argv: Sequence[str]) -> int:
    """Run the command in ``argv``; return the exit code."""
    options = parser().parse_args(argv)
    if options.curve_dir is None and options.run is not _reload:
        return fail(
            PROG, f"--curve-dir or ${VARIABLE} is required: the directory of the keys", EXIT_FAILED
        )
    try:
        found = options.run(user_path(str(options.curve_dir or "")), options)
    except (CurveError, AllowListError, ServerRefused) as error:
        return fail(PROG, error, EXIT_FAILED)
    except NoServer as error:
        return fail(PROG, error, EXIT_NO_SERVER)
    except OSError as error:
        return fail(PROG, f"{options.curve_dir}: {error.strerror}", EXIT_FAILED)
    sys.stdout.write((json.dumps(found) if options.json else _text(found)) + "\n")
    return EXIT_OK


def _make_server(directory: Path, options: argparse.Namespace) -> dict[str, Any]:
    return {"server key": create_pair(directory, "server").public}


def _make_engine(directory: Path, options: argparse.Namespace) -> dict[str, Any]:
    is_a_server = (directory / "server.secret").exists()
    if is_a_server and load_public(directory, "server") != options.server:
        raise CurveError(f"{directory} has the keys of another server: use another directory")
    own = create_pair(directory, "engine").public
    (directory / "server.key").write_text(options.server + "\n")
    return {"engine key": own}


def _key(text: str) -> str:
    if not is_key(text):
        raise argparse.ArgumentTypeError(f"{text[:70]!r} is not a key of 64 hexadecimal digits")
    return text


def _make_all(directory: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Create the keys of a server and of engines that read the same directory. Keys of engines
    elsewhere stay on the list."""
    check_free(directory, "server", "engine")
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _changing(directory):
        listed = read_allow_list(directory / ALLOW_LIST).values()
        server = create_pair(directory, "server").public
        engine = create_pair(directory, "engine").public
        allowed = parse_allowed_key(engine, [f"name={_NATIVE}"])
        others = [one for one in listed if one.name != _NATIVE]
        write_allow_list(directory / ALLOW_LIST, [*others, allowed])
    return {"server key": server, "engine key": engine, "allowed": _describe(allowed)}


def _allow(directory: Path, options: argparse.Namespace) -> dict[str, Any]:
    fields = [f"name={options.name}"] if options.name else []
    fields += [f"models={','.join(options.model)}"] if options.model else []
    allowed = parse_allowed_key(options.key, fields)
    if any("," in name for name in options.model or ()):
        raise AllowListError("--model: a name with a comma cannot be on the list")
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _changing(directory):
        keys = read_allow_list(directory / ALLOW_LIST)
        keys[allowed.key] = allowed
        if any(one.name == allowed.name and one.key != allowed.key for one in keys.values()):
            raise AllowListError(f"the name {allowed.name} belongs to another key")
        write_allow_list(directory / ALLOW_LIST, keys.values())
    return {"allowed": _describe(allowed)}


def _remove(directory: Path, options: argparse.Namespace) -> dict[str, Any]:
    with _changing(directory):
        keys = read_allow_list(directory / ALLOW_LIST)
        found = [one for one in keys.values() if options.key in (one.key, one.name)]
        if not found:
            raise AllowListError(f"no key or name {options.key!r} is on the allow list")
        write_allow_list(directory / ALLOW_LIST, [one for one in keys.values() if one not in found])
    return {"removed": _describe(found[0])}


@contextmanager
def _changing(directory: Path) -> Iterator[None]:
    """Lock the list against other commands, whose changes would be lost."""
    lock = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _list(directory: Path, options: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    roles: tuple[Role, ...] = ("server", "engine")
    for role in roles:
        if (directory / f"{role}.key").exists():
            found[f"{role} key"] = load_public(directory, role)
    keys = read_allow_list(directory / ALLOW_LIST)
    return found | {"allowed": [_describe(one) for one in keys.values()]}


def _reload(directory: Path, options: argparse.Namespace) -> dict[str, Any]:
    done = administrate(options, "POST", "keys", "reload")
    return {"API keys": done["count"]}


def _describe(allowed: AllowedKey) -> dict[str, Any]:
    models = None if allowed.models is None else sorted(allowed.models)
    return {"name": allowed.name, "models": models, "key": allowed.key}


def _text(found: dict[str, Any]) -> str:
    lines = []
    for what, value in found.items():
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, dict):
                models = "any model" if each["models"] is None else ", ".join(each["models"])
                each = f"{each['key']}  {each['name']}: {models}"
            lines.append(f"{what:<11} {each}")
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    common = CommandParser(add_help=False)
    common.add_argument(
        "--curve-dir",
        type=Path,
        metavar="PATH",
        default=Path(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else None,
        help=f"directory of the keys (default: ${VARIABLE})",
    )
    common.add_argument("--json", action="store_true", help="print one JSON object")
    made = CommandParser(
        prog=PROG,
        description="Manage keys for engines that join over tcp. A running server reloads the "
        "allow list when it changes.",
        epilog=EXIT_CODES,
    )
    commands = made.add_subparsers(metavar="COMMAND", required=True)

    def command(name: str, run: Any, help: str) -> argparse.ArgumentParser:
        each = commands.add_parser(
            name, parents=[common], help=help, description=help, epilog=EXIT_CODES
        )
        each.set_defaults(run=run)
        return each

    command(
        "init", _make_all, "create the keys of a server and of engines next to it, which may join"
    )
    command("server", _make_server, "create the keys of this machine's router and kvstore")
    engine = command("engine", _make_engine, "create the keys of engines on this machine")
    engine.add_argument(
        "--server", required=True, type=_key, metavar="KEY", help="the server's public key"
    )
    allow = command("allow", _allow, "allow engines with a public key to join")
    allow.add_argument("key", metavar="KEY", help="the engine's public key")
    allow.add_argument("--name", help="name for its engines (default: the start of the key)")
    allow.add_argument(
        "--model", action="append", help="a model that they may serve; repeatable (default: any)"
    )
    remove = command("remove", _remove, "remove a key from the allow list")
    remove.add_argument("key", metavar="KEY", help="the public key, or its name on the list")
    reload = command("reload", _reload, "make a running server reload its API keys")
    add_server_flags(reload)
    command("list", _list, "show the public keys and the allow list")
    return made
