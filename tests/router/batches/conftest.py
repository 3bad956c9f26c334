"""A router with a directory for batches, an engine that says "hello world", and OpenAI's client."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from router.batches.directory import BatchDirectory
from tests.router.conftest import Server
from tests.router.scripted_engine import ScriptedEngine

ENDED = ("completed", "failed", "expired", "cancelled")
Body = dict[str, Any]
ASKED: Body = {"endpoint": "/v1/completions", "completion_window": "24h"}


class BatchClient:
    """What a user of OpenAI's client does with files and batches."""

    def __init__(self, url: str, key: str = "none") -> None:
        self.api = OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=30)

    def upload(self, content: bytes | list[Body]) -> str:
        if not isinstance(content, bytes):
            content = b"".join(json.dumps(line).encode() + b"\n" for line in content)
        return self.api.files.create(file=("in.jsonl", content), purpose="batch").id

    def leftovers(self, directory: Path) -> set[str]:
        """Return the files in a server's ``directory`` that it does not list."""
        known = {each.id for each in self.api.files.list(limit=10_000)}
        return {path.name for path in (directory / "files").iterdir()} - known

    def create(self, content: bytes | list[Body], **fields: Any) -> Any:
        return self.create_of(self.upload(content), **fields)

    def create_of(self, file_id: str, **fields: Any) -> Any:
        """Create a batch of a file that is there."""
        return self.api.batches.create(input_file_id=file_id, **{**ASKED, **fields})

    def wait(self, batch: Any, timeout_s: float = 60, *, states: tuple[str, ...] = ENDED) -> Any:
        deadline = time.monotonic() + timeout_s
        while True:
            found = self.api.batches.retrieve(batch.id)
            if found.status in states:
                return found
            assert time.monotonic() < deadline, found
            time.sleep(0.05)

    def run(self, content: bytes | list[Body], **fields: Any) -> Any:
        return self.wait(self.create(content, **fields))

    def completed(self, batch: Any) -> int:
        counts = self.api.batches.retrieve(batch.id).request_counts
        assert counts is not None
        return counts.completed

    def lines(self, file_id: str | None) -> list[Body]:
        assert file_id is not None
        return [json.loads(line) for line in self.api.files.content(file_id).iter_lines()]

    def ids(self, file_id: str | None) -> list[str]:
        """Return the names of the lines of a file."""
        return [line["custom_id"] for line in self.lines(file_id)]


def line(custom_id: str, url: str = "/v1/completions", **body: Any) -> Body:
    if url == "/v1/completions":
        body = {"model": "tiny", "prompt": "hello", "max_tokens": 4} | body
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


@pytest.fixture(scope="module")
def batch_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("batches")


@pytest.fixture(scope="module")
def server(start_server: Callable[..., Server], batch_dir: Path) -> Server:
    return start_server(
        f"--batch-dir={batch_dir}",
        *("--restart-wait-s=1", "--batch-file-mb=2", "--admin-key=boss"),
        "--max-request-bytes=1048576",
    )


@pytest.fixture
def batches(server: Server) -> BatchClient:
    return BatchClient(server.url)


@pytest.fixture
def served(batches: BatchClient, engine: ScriptedEngine) -> BatchClient:
    """Return the client of a server with an engine."""
    return batches


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[BatchDirectory]:
    found = BatchDirectory(tmp_path)
    yield found
    found.close()
