"""Server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html) over HTTP,
for commands that read a server's streams."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPException, HTTPResponse
from types import MappingProxyType
from typing import Any, NamedTuple

from services.commands.admin_client import NoServer, ServerRefused, authorization
from shared.network.opener import opener


class StreamRefused(ServerRefused):
    """The server responded with an error of this ``status``; the message is the server's."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class ServerEvent(NamedTuple):
    name: str  # "message" unless the server names it
    data: str


@contextmanager
def opened(
    url: str,
    key: str,
    timeout_s: float,
    body: Mapping[str, Any] | Iterator[bytes] | None = None,
    *,
    method: str | None = None,
    headers: Mapping[str, str] = MappingProxyType({"Content-Type": "application/json"}),
    handlers: tuple[Any, ...] = (),
) -> Iterator[HTTPResponse]:
    """Yield the response of ``url``, to a POST of ``body`` if given: a mapping is sent as JSON,
    pieces as they are. ``handlers`` replace some of urllib's.

    ``timeout_s`` applies to each wait, also while the response is read. Raises `ServerRefused`,
    and `NoServer` if the connection fails, also inside the context.
    """
    if not url.startswith(("http://", "https://")):
        raise NoServer(f"--url: {url} does not begin with http:// or https://")
    data = json.dumps(body).encode() if isinstance(body, Mapping) else body
    headers = {**headers, **authorization(key)}
    failed = "no server responds at"
    try:
        try:
            request = urllib.request.Request(url, data, headers, method=method)
            answer = opener(*handlers).open(request, timeout=timeout_s)
        except ValueError as error:
            raise NoServer(f"--url: {url}: {error}") from None
        with answer:
            failed = "the response is incomplete at"
            yield answer
    except urllib.error.HTTPError as error:
        with error:
            message = _message(error.read()) or f"{url} responds with {error.code} {error.reason}"
        raise StreamRefused(message, error.code) from None
    except (OSError, HTTPException) as error:
        reason = " ".join(str(getattr(error, "reason", error) or type(error).__name__).split())
        raise NoServer(f"{failed} {url}: {reason}") from None


def _message(body: bytes) -> str | None:
    """Return the message of an error in OpenAI's format."""
    try:
        found: object = json.loads(body)["error"]["message"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return " ".join(found.split()) if isinstance(found, str) else None


def events(lines: Iterable[bytes]) -> Iterator[ServerEvent]:
    """Yield the events in ``lines``. Comments are skipped."""
    name = "message"
    data: list[str] = []
    for raw in lines:
        line = raw.decode(errors="replace").rstrip("\r\n")
        field, _, value = line.partition(":")
        if not line:
            if data:
                yield ServerEvent(name, "\n".join(data))
            name, data = "message", []
        elif field == "data":
            data.append(value.removeprefix(" "))
        elif field == "event":
            name = value.removeprefix(" ")
