"""Open WebUI as installed from PyPI, with a port and data of its own, and its page in Chromium."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import harness as h
from playwright.sync_api import BrowserContext, FilePayload, Locator, Page, expect, sync_playwright

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
SECOND = "second"
"""Open WebUI puts this and a dot before the names of the second server's models."""
OPENAI, OPENAI_SECOND = "openai", "openai-second"
"""The same for models that it asks by OpenAI's API."""
_START_S, _ANSWER_S = 240, 90
_SETTINGS = {
    "WEBUI_AUTH": "False",  # nobody signs in
    "OFFLINE_MODE": "True",
    "HF_HUB_OFFLINE": "1",
    "ANONYMIZED_TELEMETRY": "False",
    "DO_NOT_TRACK": "True",
    "ENABLE_COMMUNITY_SHARING": "False",
    # The demo model cannot write these: it does not end.
    "ENABLE_TITLE_GENERATION": "False",
    "ENABLE_TAGS_GENERATION": "False",
    "ENABLE_FOLLOW_UP_GENERATION": "False",
    "ENABLE_RETRIEVAL_QUERY_GENERATION": "False",
    "RAG_EMBEDDING_ENGINE": "ollama",  # otherwise a model of the hub
    "OLLAMA_BASE_URLS": f"{h.URL};{h.CALLER}",
    "OLLAMA_API_CONFIGS": json.dumps(
        {"0": {"key": h.KEY}, "1": {"key": h.KEY, "prefix_id": SECOND}}
    ),
    "OPENAI_API_BASE_URLS": f"{h.URL}/v1;{h.CALLER}/v1",
    "OPENAI_API_KEYS": f"{h.KEY};{h.KEY}",
    "OPENAI_API_CONFIGS": json.dumps(
        {"0": {"prefix_id": OPENAI}, "1": {"prefix_id": OPENAI_SECOND}}
    ),
}


class Application:
    """Open WebUI while it runs."""

    def __init__(self, url: str, browser: BrowserContext | None) -> None:
        self.url, self._browser = url, browser
        self._headers = {"content-type": "application/json"}
        token = self.post("/api/v1/auths/signin", {"email": "", "password": ""})["token"]
        self._headers["authorization"] = f"Bearer {token}"

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """Send what the settings pages send."""
        data = json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, self._headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    @contextmanager
    def chat(self, model: str) -> Iterator["Chat"]:
        """Open a page with a new chat with ``model``."""
        if self._browser is None:
            raise h.NotApplicable("there is no Chromium")
        page = self._browser.new_page()
        page.set_default_timeout(_ANSWER_S * 1000)
        # The first page of a version shows what is new in it.
        page.add_locator_handler(
            page.get_by_role("heading", name="What's New"),
            lambda: page.get_by_role("dialog").get_by_role("button", name="Close").click(),
        )
        try:
            page.goto(f"{self.url}/?models={model}")
            page.get_by_role("heading", name=model).wait_for()
            yield Chat(page)
        finally:
            page.close()


class Chat:
    """A page with a chat."""

    def __init__(self, page: Page) -> None:
        self.page = page

    @property
    def answer(self) -> Locator:
        """The last message, which is the model's once the answer begins."""
        return self.page.get_by_role("log").get_by_role("listitem").last

    def send(self, text: str) -> None:
        self.page.locator("#chat-input").fill(text)
        self.page.keyboard.press("Enter")

    def ask(self, text: str) -> str:
        """Return the whole text of the answer's message."""
        self.send(text)
        self.page.get_by_role("button", name="Regenerate").wait_for()
        return self.answer.inner_text()

    def stop(self) -> None:
        self.page.get_by_role("button", name="Stop", exact=True).click()

    def use_tool(self, name: str) -> None:
        self.page.get_by_role("button", name="Integrations").click()
        self.page.get_by_role("menuitem", name="Tools").click()
        self.page.get_by_role("menuitemcheckbox", name=name).click()
        self.page.keyboard.press("Escape")

    def upload(self, name: str, text: str) -> None:
        """Upload a file, and wait until Open WebUI has read and embedded it."""
        self.page.get_by_role("button", name="More").click()
        with self.page.expect_file_chooser() as chooser:
            self.page.get_by_role("menuitem", name="Upload Files").click()
        file = FilePayload(name=name, mimeType="text/plain", buffer=text.encode())
        with self.page.expect_response("**/process/status**") as processed:
            chooser.value.set_files([file])
        processed.value.finished()
        self.page.get_by_role("button", name=name).wait_for()

    def expect(self, text: str) -> None:
        """Wait until the answer contains ``text``."""
        expect(self.answer).to_contain_text(text, timeout=_ANSWER_S * 1000)


@contextmanager
def _browser() -> Iterator[BrowserContext | None]:
    if CHROMIUM is None:
        yield None
        return
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser.new_context()  # one for all, so that the page is loaded once
        browser.close()


@contextmanager
def running(**settings: str) -> Iterator[Application]:
    """Start Open WebUI with more ``settings``. Its log goes to stderr."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="open-webui-") as data:
        private = {
            "DATA_DIR": data,
            "HOME": data,
            "WEBUI_SECRET_KEY": "secret" * 8,
        }
        program = Path(sys.executable).with_name("open-webui")
        process = subprocess.Popen(
            [program, "serve", "--host", "127.0.0.1", "--port", str(port)],
            env=os.environ | _SETTINGS | private | settings,
            cwd=data,
            stdout=sys.stderr,
        )
        try:
            _wait(f"http://127.0.0.1:{port}/health", process)
            with _browser() as browser:
                yield Application(f"http://127.0.0.1:{port}", browser)
        finally:
            process.terminate()
            process.wait(30)


def _wait(url: str, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + _START_S
    while True:
        h.check(process.poll() is None, f"Open WebUI ended with code {process.returncode}")
        h.check(time.monotonic() < deadline, f"Open WebUI was not ready after {_START_S} s")
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except OSError:
            time.sleep(0.5)
