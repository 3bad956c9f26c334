"""What clients send as images that is none, or far too much."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import httpx
import pytest

from tests.router.conftest import Server, StartServer, begin, error_of, ok
from tests.router.images.conftest import Ask
from tests.router.images.pictures import bad_pictures, data_url, encoded, forbidden_urls, picture

pytestmark = pytest.mark.usefixtures("seeing")
GOOD = data_url(encoded(picture()))


class Probe:
    """Asks `/livez` all the time, and keeps the longest that an answer took."""

    def __init__(self, server: Server) -> None:
        self._url = f"{server.url}/livez"
        self._done = threading.Event()
        self.worst_s = 0.0

    def _run(self) -> None:
        with httpx.Client() as client:
            while not self._done.wait(0.02):
                began = time.monotonic()
                ok(client.get(self._url))
                self.worst_s = max(self.worst_s, time.monotonic() - began)

    def __enter__(self) -> Probe:
        self._running = begin(self._run)
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._running.result()


def test_each_bad_image_is_refused_with_a_reason(server: Server, ask: Ask) -> None:
    assert ask(GOOD).status_code == 200  # the process has started
    bad = list(bad_pictures())
    assert len(bad) >= 90
    with Probe(server) as probe:
        for url, word in bad:
            answer = ask(url)
            error = answer.json().get("error", {})
            assert answer.status_code == 400, (url[:120], answer.text[:500])
            assert error["param"] == "messages[0].content[0]"
            assert word in error["message"], (url[:120], error)
    assert ask(GOOD).status_code == 200
    # The loop itself, whatever else this machine does: a slow answer alone may be the client's.
    worst_s = server.metric("event_loop_lag_max_seconds ")
    assert worst_s < 1, probe.worst_s


def test_too_many_images_are_refused(ask: Ask) -> None:
    error = ask(*[GOOD] * 100).json()["error"]
    assert error["code"] == "too_many_images" and "more than 32 images" in error["message"]


def test_nothing_is_fetched(ask: Ask) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.2)
        for url in forbidden_urls(listener.getsockname()[1]):
            error = ask(url).json()["error"]
            assert error["code"] == "invalid_image_url", (url, error)
        with pytest.raises(TimeoutError):
            listener.accept()


PDF = data_url(b"%PDF-1.7\n", "application/pdf")


@pytest.mark.parametrize(
    ("path", "field", "part"),
    [
        ("/v1/chat/completions", "messages", {"type": "file", "file": {"file_data": PDF}}),
        ("/v1/responses", "input", {"type": "input_file", "file_data": PDF}),
    ],
)
def test_a_file_is_refused_with_advice(server: Server, path: str, field: str, part: Any) -> None:
    error = error_of(server.post(path, **{field: [{"role": "user", "content": [part]}]}))
    assert error["code"] == "unsupported_content"
    assert error["message"].endswith("send a PDF's text, or its pages as images.")


def test_images_are_refused_without_vision(start_server: StartServer) -> None:
    server = start_server()
    server.join()
    for path, field, part in (
        ("/v1/chat/completions", "messages", {"type": "image_url", "image_url": {"url": GOOD}}),
        ("/v1/responses", "input", {"type": "input_image", "image_url": GOOD}),
    ):
        error = error_of(server.post(path, **{field: [{"role": "user", "content": [part]}]}))
        assert error["code"] == "unsupported_content"
        assert error["param"] == f"{field}[0].content[0].type"
