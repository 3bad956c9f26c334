"""The writer of lines' ends."""

from __future__ import annotations

import asyncio

import pytest

from router.batches.storage.directory import BatchDirectory
from router.batches.storage.states import BatchState
from router.batches.storage.store import BatchStore, Result
from router.batches.storage.writer import ResultWriter
from tests.conftest import in_loop
from tests.router.batches.test_states import added


@pytest.mark.parametrize("error", [MemoryError, OverflowError])
@in_loop
async def test_an_error_that_is_not_the_disks_holds_no_line_up_for_good(
    directory: BatchDirectory, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    monkeypatch.setattr("router.batches.storage.writer._AGAIN_S", 0.01)
    add, failures = BatchStore.add_results, [error()]

    def add_results(store: BatchStore, results: list[Result]) -> None:
        if failures:
            raise failures.pop()
        add(store, results)

    monkeypatch.setattr(BatchStore, "add_results", add_results)
    errors = list[None]()
    writer = ResultWriter(directory, asyncio.Event(), lambda: errors.append(None))
    number = await directory.run(added)
    await directory.run(lambda store: store.advance(number, BatchState.IN_PROGRESS, total=2))
    for line in (1, 2):
        async with asyncio.timeout(5):
            assert await writer.write(Result(number, line, True, b"x"))
    assert len(errors) == 1
    assert list(await directory.run(lambda store: store.lines_done(number))) == [1, 2]
