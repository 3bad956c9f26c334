"""The end of `mlx-lm-server batch`: the results are there, and the server's files are deleted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from services.commands.admin_client import NoServer
from services.commands.batch.client import BatchStatus
from services.commands.batch.work import Work
from services.commands.event_stream import StreamRefused

RESULT = b'{"custom_id": "1"}\n'


class FinishedBatches:
    """A server with one batch, which has been answered. Deleting its files fails with ``error``."""

    def __init__(self, error: BaseException) -> None:
        self._error = error
        self.files = {"in": b"", "out": RESULT}

    def upload(self, path: Path) -> str:
        return "in"

    def find(self, batch_id: str) -> BatchStatus:
        return BatchStatus(batch_id, "completed", 1, 1, 0, ("out", None), [])

    def create(self, *_: str) -> BatchStatus:
        return self.find("b")

    def download(self, file_id: str, to: Path) -> None:
        to.write_bytes(self.files[file_id])

    def delete(self, file_id: str) -> None:
        del self.files[file_id]
        raise self._error


@pytest.mark.parametrize(
    ("error", "kept"),
    [
        (KeyboardInterrupt(), {"out": RESULT}),
        (NoServer("it is gone"), {"out": RESULT}),
        (StreamRefused("no such file", 404), {}),
    ],
)
def test_a_batch_is_done_once_its_results_are_written(
    error: BaseException, kept: dict[str, bytes], tmp_path: Path
) -> None:
    (tmp_path / "in").write_text('{"custom_id": "1", "url": "/v1/completions"}\n')
    work = Work(tmp_path / "in", tmp_path / "out", "24h", in_order=False)
    work.prepare()
    api: Any = FinishedBatches(error)
    assert work.run(api, lambda found: None).status == "completed"
    assert work.target.read_bytes() == RESULT
    assert not work.folder.exists() and api.files == kept
