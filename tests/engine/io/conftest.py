from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kvstore.process import Process


@pytest.fixture
def kvstore(tmp_path: Path, socket_dir: Path) -> Iterator[Process]:
    process = Process(tmp_path / "blocks", socket_dir / "kvstore")
    process.start()
    yield process
    process.end()
