"""A hub of models on this machine: the part of its HTTP API that a download needs."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socket import SHUT_RDWR
from threading import Event, Thread

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """It has the model ``me/tiny``. While ``is_open`` is clear, it sends half of each file. It
    answers with the status ``fails`` if that is set, and resets the connections of as many files as
    ``resets``, each in its middle."""

    fails = 0
    resets = 0

    def __init__(self, model: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files = {path.name: path.read_bytes() for path in model.iterdir() if path.is_file()}
        self.requests: list[tuple[str, str | None]] = []
        """The paths and ranges that were asked for."""
        self.is_open = Event()
        self.is_open.set()
        Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        self.server.requests.append((self.path, self.headers.get("range")))
        if self.server.fails:
            self.send_response(self.server.fails)
            self.send_header("content-length", "0")
            self.end_headers()
            return
        path, _, name = self.path.partition("?")[0].rpartition("/")
        if path.startswith("/api/models/me/tiny/tree"):
            path, name = "/api/models/me/tiny/tree", ""
        if path == "/api/models/me/tiny/tree":
            entries = [
                {"type": "file", "path": each, "size": len(data), "oid": _digest(data)}
                for each, data in self.server.files.items()
            ]
            self._send(json.dumps(entries).encode(), {}, with_body)
        elif self.path.startswith("/api/models/me/tiny"):
            siblings = [{"rfilename": each} for each in self.server.files]
            found = {"id": "me/tiny", "modelId": "me/tiny", "sha": COMMIT, "siblings": siblings}
            self._send(json.dumps(found).encode(), {}, with_body)
        elif path.startswith("/me/tiny/resolve/") and name in self.server.files:
            data = self.server.files[name]
            headers = {"ETag": f'"{_digest(data)}"', "X-Repo-Commit": COMMIT}
            self._send(data, headers, with_body)
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("content-length", "0")
            self.end_headers()

    def _send(self, data: bytes, headers: dict[str, str], with_body: bool) -> None:
        self.send_response(200)
        for name, value in {**headers, "content-length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            half = len(data) // 2
            self.wfile.write(data[:half])
            if headers and self.server.resets:
                self.server.resets -= 1
                self.close_connection = True
                self.connection.shutdown(SHUT_RDWR)
                return
            if headers:  # of a file
                self.server.is_open.wait(60)
            self.wfile.write(data[half:])

    def handle(self) -> None:
        with suppress(ConnectionError):  # a client that was killed
            super().handle()

    def log_message(self, *_: object) -> None:
        pass


def _digest(data: bytes) -> str:
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()
