"""What the commands that ask a running server have in common: its address, its key, its errors.

Exit codes: 0 done, 1 the server refused or failed, 2 wrong arguments, 3 no server answered.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import quote, urlencode

from shared.exits import EXIT_FAILED, fail

EXIT_NO_SERVER = 3
EXIT_CODES = (
    "Exit codes: 0 done, 1 not done (one line says why), 2 wrong arguments, 3 no server answers."
)
KEY_VARIABLE = "MLX_LM_SERVER_ADMIN_KEY"
URL_VARIABLE = "MLX_LM_SERVER_URL"
_TIMEOUT_S = 30


class ServerRefused(Exception):
    """The server answered with an error; the message is one line for the user."""


class NoServer(Exception):
    """No server answered; the message is one line for the user."""


def add_server_flags(parser: argparse.ArgumentParser, *, admin: bool = True) -> None:
    parser.add_argument(
        "--url",
        default=os.environ.get(URL_VARIABLE, "http://127.0.0.1:8000"),
        help=f"the server (default: ${URL_VARIABLE}, else http://127.0.0.1:8000)",
    )
    if admin:
        parser.add_argument(
            "--admin-key",
            default=os.environ.get(KEY_VARIABLE, ""),
            help=f"the server's --admin-key (default: ${KEY_VARIABLE}, which others cannot see)",
        )


def add_json_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def ask(options: argparse.Namespace, method: str, *path: str, **query: str) -> tuple[int, Any]:
    """Return the status and the JSON body of the answer. Raises `NoServer`."""
    url = "/".join([options.url.rstrip("/"), *(quote(part, safe="") for part in path)])
    if not url.startswith(("http://", "https://")):
        raise NoServer(f"no server at {options.url}: an address begins with http:// or https://")
    request = urllib.request.Request(url + (f"?{urlencode(query)}" if query else ""), method=method)
    if getattr(options, "admin_key", ""):
        request.add_header("Authorization", f"Bearer {options.admin_key}")
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        try:
            return error.code, json.load(error)
        except ValueError:
            raise NoServer(f"{options.url} answers {error.code}, but is no mlx-lm-server") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise NoServer(f"no server answers at {options.url}: {reason}") from None


def administrate(options: argparse.Namespace, method: str, *path: str, **query: str) -> Any:
    """Return the body of the answer of a path below /admin. Raises `ServerRefused`, `NoServer`."""
    status, body = ask(options, method, "admin", *path, **query)
    if status == 200:
        return body
    hint = ""
    if status in (401, 403):
        hint = f" (give --admin-key or ${KEY_VARIABLE})"
    elif status == 404 and body.get("error", {}).get("code") == "not_found":
        hint = " (the server was started without --admin-key)"
    raise ServerRefused(f"{body['error']['message']}{hint}")


def run(
    prog: str, parser: argparse.ArgumentParser, argv: Sequence[str], act: Callable[..., Any]
) -> int:
    """Parse ``argv``, and print what ``act(options)`` returns: an exit code and a text or data."""
    options = parser.parse_args(argv)
    try:
        code, found, text = act(options)
    except ServerRefused as error:
        return fail(prog, error, EXIT_FAILED)
    except NoServer as error:
        return fail(prog, error, EXIT_NO_SERVER)
    sys.stdout.write((json.dumps(found) if options.json else text) + "\n")
    return int(code)


def table(rows: Sequence[Sequence[object]]) -> str:
    """Return ``rows`` as lines with columns."""
    texts = [["-" if cell is None else str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in texts
    )
