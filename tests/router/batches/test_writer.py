"""Results of lines, which are written together."""

from __future__ import annotations

import asyncio

import pytest

from router.batches.directory import BatchDirectory
from router.batches.store import BatchState, BatchStore, Result, storage_failed
from tests.conftest import in_loop
from tests.router.batches.test_states import added


@in_loop
async def test_results_that_wait_for_the_disk_are_one_transaction(
    directory: BatchDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.batches.directory.AGAIN_S", 0.01)
    add, failures, sizes = BatchStore.add_results, [storage_failed("full")] * 3, list[int]()

    def add_results(store: BatchStore, results: list[Result]) -> None:
        if failures and results:
            raise failures.pop()
        sizes.append(len(results))
        add(store, results)

    monkeypatch.setattr(BatchStore, "add_results", add_results)
    number = await directory.run(added)
    await directory.run(lambda store: store.advance(number, BatchState.IN_PROGRESS, total=9))
    async with asyncio.timeout(5):
        lines = [Result(number, line, True, b"x") for line in range(9)]
        await asyncio.gather(*map(directory.add_result, lines))
    assert list(await directory.run(lambda store: store.lines_done(number))) == list(range(9))
    assert max(sizes) > 1


@in_loop
async def test_an_error_that_is_not_the_disks_holds_no_line_up_for_good(
    directory: BatchDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    add, failures = BatchStore.add_results, [MemoryError()]

    def add_results(store: BatchStore, results: list[Result]) -> None:
        if failures:
            raise failures.pop()
        add(store, results)

    monkeypatch.setattr(BatchStore, "add_results", add_results)
    number = await directory.run(added)
    await directory.run(lambda store: store.advance(number, BatchState.IN_PROGRESS, total=2))
    with pytest.raises(MemoryError):  # its batch runs the line again
        await directory.add_result(Result(number, 1, True, b"x"))
    for line in (1, 2):
        async with asyncio.timeout(5):
            await directory.add_result(Result(number, line, True, b"x"))
    assert list(await directory.run(lambda store: store.lines_done(number))) == [1, 2]
