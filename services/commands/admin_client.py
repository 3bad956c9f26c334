"""The shared part of commands that talk to a running server: its address, key and errors.

Exit codes: 0 done, 1 the server refused or failed, 2 invalid arguments, 3 no server responds.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from http.client import HTTPException
from typing import Any
from urllib.parse import quote, urlencode

from shared.exits import EXIT_FAILED, fail
from shared.network.opener import opener

EXIT_NO_SERVER = 3
EXIT_CODES = (
    "Exit codes: 0 done, 1 failed (the reason is printed), 2 invalid arguments, 3 no server "
    "responds."
)
KEY_VARIABLE = "MLX_LM_SERVER_ADMIN_KEY"
URL_VARIABLE = "MLX_LM_SERVER_URL"
_URL = "http://127.0.0.1:8000"
_TIMEOUT_S = 30
_ANSWERS = {"done", "engines", "requests"}
"""Keys, one of which is in each response of a path below /admin."""


class ServerRefused(Exception):
    """The server responded with an error; the message is one line for the user."""


class NoServer(Exception):
    """No server responded; the message is one line for the user."""


class ServerFields(dict[str, Any]):
    """A JSON object of a response. To look up a field that is missing raises `NoServer`."""

    def __missing__(self, name: str) -> Any:
        raise NoServer(f"the server has another version: its response has no field {name!r}")


def add_server_flags(
    parser: argparse.ArgumentParser, *, admin: bool = True, url_help: str | None = None
) -> None:
    """Add the flags of commands that ask a server. With ``url_help``, --url has no default."""
    parser.add_argument(
        "--url",
        default=None if url_help else default_url(),
        help=url_help or f"server URL (default: ${URL_VARIABLE}, else {_URL})",
    )
    if admin:
        parser.add_argument(
            "--admin-key",
            default=os.environ.get(KEY_VARIABLE, ""),
            help=f"the server's --admin-key (default: ${KEY_VARIABLE}, which other users cannot "
            "read)",
        )


def default_url() -> str:
    """Return the URL in the environment, if one is set."""
    return os.environ.get(URL_VARIABLE) or _URL


def add_json_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def ask(options: argparse.Namespace, method: str, *path: str, **query: str) -> tuple[int, Any]:
    """Return the status and the JSON object of the response. Raises `NoServer`, `ServerRefused`."""
    url = "/".join([options.url.rstrip("/"), *(quote(part, safe="") for part in path)])
    if not url.startswith(("http://", "https://")):
        raise NoServer(f"{options.url} is not a server URL: it must begin with http:// or https://")
    url += f"?{urlencode(query)}" if query else ""
    headers = authorization(getattr(options, "admin_key", ""))
    try:
        request = urllib.request.Request(url, headers=headers, method=method)
        status, text = _send(request)
    except (OSError, ValueError, HTTPException) as error:
        reason = " ".join(str(getattr(error, "reason", error)).split())
        raise NoServer(f"no server responds at {options.url}: {reason}") from None
    body = json_object(text)
    if body is None:
        raise _other_server(options, status)
    return status, body


def authorization(key: str) -> dict[str, str]:
    """Return the header with ``key``, if it is not empty. Raises `ServerRefused`."""
    if not key.isascii() or not key.isprintable():
        raise ServerRefused("the key has characters that a header cannot carry; use ASCII")
    return {"Authorization": f"Bearer {key}"} if key else {}


def json_object(text: bytes) -> ServerFields | None:
    """Return the JSON object that a server sent; None if it sent something else."""
    try:
        found = json.loads(text, object_hook=ServerFields)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, ServerFields) else None


def _send(request: urllib.request.Request) -> tuple[int, bytes]:
    try:
        with opener().open(request, timeout=_TIMEOUT_S) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def administrate(options: argparse.Namespace, method: str, *path: str, **query: str) -> Any:
    """Return the response body of a path below /admin. Raises `ServerRefused`, `NoServer`."""
    status, body = ask(options, method, "admin", *path, **query)
    if status == 200 and body.keys() & _ANSWERS:
        return body
    if status == 200 or not isinstance(body.get("error"), dict) or "message" not in body["error"]:
        raise _other_server(options, status)
    hint = ""
    if status in (401, 403):
        hint = f" (set --admin-key or ${KEY_VARIABLE})"
    elif status == 404 and body["error"].get("code") == "not_found":
        hint = " (the server was started without --admin-key)"
    raise ServerRefused(f"{body['error']['message']}{hint}")


def _other_server(options: argparse.Namespace, status: int) -> NoServer:
    return NoServer(f"{options.url} responds with {status}, but is not an mlx-lm-server")


def run(
    prog: str, parser: argparse.ArgumentParser, argv: Sequence[str], act: Callable[..., Any]
) -> int:
    """Parse ``argv``, and print the result of ``act(options)``: an exit code and a text or data."""
    options = parser.parse_args(argv)
    try:
        code, found, text = act(options)
    except ServerRefused as error:
        return fail(prog, error, EXIT_FAILED)
    except NoServer as error:
        return fail(prog, error, EXIT_NO_SERVER)
    except KeyboardInterrupt:  # the user stopped waiting; the server continues
        return 128 + signal.SIGINT
    if options.json or text:
        sys.stdout.write((json.dumps(found) if options.json else text) + "\n")
    return int(code)


def table(rows: Sequence[Sequence[object]]) -> str:
    """Return ``rows`` as lines with aligned columns."""
    texts = [["-" if cell is None else str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in texts
    )
