"""The short form of `make test-store`."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tests.kvstore.store_run import StoreRun


@pytest.mark.parametrize("seed", range(5))
def test_random_operations_on_a_disk_that_fails(
    tmp_path: Path, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    run = StoreRun(tmp_path, seed)
    run.run(250)
    assert run.kills > 0
