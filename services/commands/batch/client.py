"""A client of `/v1/files` and `/v1/batches`."""

from __future__ import annotations

import shutil
import urllib.request
import uuid
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPResponse, HTTPSConnection
from pathlib import Path
from typing import Any, NamedTuple

from services.commands.admin_client import NoServer, ServerFields, json_object
from services.commands.event_stream import opened

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
            return str(self._ask("files", _body(head, file, tail), headers=headers)["id"])

    def create(self, file_id: str, endpoint: str, window: str) -> BatchStatus:
        body = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": window}
        return _status(self._ask("batches", body))

    def find(self, batch_id: str) -> BatchStatus:
        return _status(self._ask(f"batches/{batch_id}"))

    def download(self, file_id: str, to: Path) -> None:
        url = f"{self._base}/files/{file_id}/content"
        with opened(url, self._key, _TIMEOUT_S) as answer, to.open("wb") as file:
            shutil.copyfileobj(answer, file, _PIECE_BYTES)
            if answer.length:
                raise NoServer(f"the connection to {url} was lost while reading the response")

    def delete(self, file_id: str) -> None:
        self._ask(f"files/{file_id}", method="DELETE")

    def _ask(
        self, path: str, body: dict[str, Any] | Iterator[bytes] | None = None, **options: Any
    ) -> ServerFields:
        url, handlers = f"{self._base}/{path}", (_Handler, _SecureHandler)
        with opened(url, self._key, _TIMEOUT_S, body, handlers=handlers, **options) as answer:
            found = json_object(answer.read())
        if found is None:
            raise NoServer(f"{url} responds, but is not an mlx-lm-server")
        return found


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
