"""A client of `/v1/files` and `/v1/batches`."""

from __future__ import annotations

import json
import shutil
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from pathlib import Path
from typing import Any, NamedTuple

from services.commands.admin_client import NoServer, ServerFields, authorization, json_object
from services.commands.event_stream import StreamRefused, opened
from shared.network.opener import opener

_TIMEOUT_S = 60.0
_PIECE_BYTES = 256 * 1024


class BatchStatus(NamedTuple):
    id: str
    status: str
    total: int
    completed: int
    failed: int
    files: tuple[str | None, str | None]
    """Ids of the files with answers and errors."""
    errors: list[str]
    """Errors in the input."""

    @property
    def has_ended(self) -> bool:
        return self.status in ("completed", "failed", "expired", "cancelled")


class BatchApi:
    """Client of the server at ``url``. All methods raise `NoServer` and `ServerRefused`."""

    def __init__(self, url: str, key: str) -> None:
        self._base, self._key = f"{url.rstrip('/').removesuffix('/v1')}/v1", key

    def upload(self, path: Path) -> str:
        """Upload a file of requests; return its id. Raises OSError if it cannot be read."""
        boundary = uuid.uuid4().hex
        head = (
            f'--{boundary}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
            f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="in.jsonl"\r\n'
            "Content-Type: application/octet-stream\r\n\r\n"
        ).encode()
        tail = f"\r\n--{boundary}--\r\n".encode()
        length = len(head) + path.stat().st_size + len(tail)
        headers = {
            "Content-Type": f"multipart/form-data; boundary={boundary}",
            "Content-Length": str(length),
        }
        with path.open("rb") as file:
            return str(self._answer("POST", "files", headers, _body(head, file, tail))["id"])

    def create(self, file_id: str, endpoint: str, window: str) -> BatchStatus:
        body = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": window}
        with opened(f"{self._base}/batches", self._key, _TIMEOUT_S, body) as answer:
            return _status(_object(answer))

    def find(self, batch_id: str) -> BatchStatus:
        with opened(f"{self._base}/batches/{batch_id}", self._key, _TIMEOUT_S) as answer:
            return _status(_object(answer))

    def cancel(self, batch_id: str) -> BatchStatus:
        with opened(f"{self._base}/batches/{batch_id}/cancel", self._key, _TIMEOUT_S, {}) as answer:
            return _status(_object(answer))

    def download(self, file_id: str, to: Path) -> None:
        url = f"{self._base}/files/{file_id}/content"
        with opened(url, self._key, _TIMEOUT_S) as answer, to.open("wb") as file:
            shutil.copyfileobj(answer, file, _PIECE_BYTES)
            if answer.length:
                raise NoServer(f"the connection to {url} was lost while reading the response")

    def delete(self, file_id: str) -> None:
        self._answer("DELETE", f"files/{file_id}", {})

    def _answer(
        self, method: str, path: str, headers: dict[str, str], data: Iterator[bytes] | None = None
    ) -> ServerFields:
        headers = {**headers, **authorization(self._key)}
        try:
            url = f"{self._base}/{path}"
            request = urllib.request.Request(url, data, headers, method=method)
            with opener(_Handler, _SecureHandler).open(request, timeout=_TIMEOUT_S) as answer:
                return _object(answer)
        except urllib.error.HTTPError as error:
            try:
                message = str(json.loads(error.read())["error"]["message"])
            except (ValueError, TypeError, KeyError):
                message = f"the server responds with {error.code} {error.reason}"
            raise StreamRefused(message, error.code) from None
        except (OSError, HTTPException, ValueError) as error:
            raise NoServer(f"no server responds at {self._base}: {error}") from None


class _Connection(HTTPConnection):
    """Reads the response also if the server did not wait for the end of the request."""

    def request(self, *args: Any, **options: Any) -> None:
        try:
            super().request(*args, **options)
        except (BrokenPipeError, ConnectionResetError):
            if self.sock is None:  # there was no connection yet
                raise


class _SecureConnection(_Connection, HTTPSConnection):
    """The same, with TLS."""


class _Handler(urllib.request.HTTPHandler):
    def http_open(self, request: urllib.request.Request) -> HTTPResponse:
        return self.do_open(_Connection, request)


class _SecureHandler(urllib.request.HTTPSHandler):
    def https_open(self, request: urllib.request.Request) -> HTTPResponse:
        return self.do_open(_SecureConnection, request)


def _body(head: bytes, file: Any, tail: bytes) -> Iterator[bytes]:
    yield head
    while piece := file.read(_PIECE_BYTES):
        yield piece
    yield tail


def _object(answer: HTTPResponse) -> ServerFields:
    found = json_object(answer.read())
    if found is None:
        raise NoServer(f"{answer.url} responds, but is not an mlx-lm-server")
    return found


def _status(found: ServerFields) -> BatchStatus:
    counts = found["request_counts"]
    errors = (found.get("errors") or {}).get("data") or []
    return BatchStatus(
        id=found["id"],
        status=found["status"],
        total=counts["total"],
        completed=counts["completed"],
        failed=counts["failed"],
        files=(found.get("output_file_id"), found.get("error_file_id")),
        errors=[f"line {each.get('line') or '-'}: {each['message']}" for each in errors],
    )
