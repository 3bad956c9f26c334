"""Batches whose files vanish, machines that sleep, and clients that are slow or cut off."""

from __future__ import annotations

import asyncio
import errno
import json
import threading
import time
from collections.abc import AsyncIterator
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request

from router.batches.directory import BatchDirectory
from router.batches.files import FileEndpoints
from router.batches.jobs import BatchJob
from router.batches.store import BatchState, BatchStore, NewFile, Result
from router.batches.uploads import Upload
from router.errors import BodyTimeout, TooManyRequests, Unavailable
from router.fleet.sequences.losses import MAX_GONE
from router.fleet.sequences.timeouts import LOST
from router.fleet.tenants.tenant import EVERYBODY, Tenant
from router.places import Places
from tests.conftest import in_loop
from tests.router.batches.conftest import line
from tests.router.batches.test_states import VALUES, file

HOUR_S = 3600


async def nothing() -> None:
    pass


def context_of(directory: BatchDirectory) -> Any:
    """Return a context in which lines never get a place."""
    limits = {"max_batch_requests": 4}
    limits |= {"batch_max_files": 9, "batch_max_mb": 9, "batch_file_mb": 1}
    parts: dict[str, Any] = {"directory": directory, "places": Places(0), "refresh": nothing}
    parts |= {"settings": SimpleNamespace(**limits), "figures": SimpleNamespace(running=0)}
    parts |= {"stopping": asyncio.Event(), "checking": asyncio.Semaphore(2)}
    return SimpleNamespace(keep_s=HOUR_S, max_bytes=10**9, max_body_bytes=10**6, **parts)


async def row_of(directory: BatchDirectory, number: int) -> Any:
    return await directory.run(lambda store: store.batch(number))


def begun(directory: BatchDirectory, **columns: Any) -> Any:
    """Return a batch of two lines, whose file is there."""
    content = "".join(json.dumps(line(name)) + "\n" for name in "ab")
    directory.path("file-0").write_text(content)

    def add(store: BatchStore) -> Any:
        store.add_file(file("file-0"))
        return store.add_batch({**VALUES, "id": "b", "expires_at": time.time() + HOUR_S, **columns})

    return directory.run(add)


async def advanced(
    directory: BatchDirectory, row: Any, *states: BatchState, total: int = 2
) -> None:
    for state in states:
        await directory.run(lambda store: store.advance(row["number"], state, total=total))  # noqa: B023


async def ended(directory: BatchDirectory, row: Any, context: Any = None) -> Any:
    """Run the batch to its end, and return its row."""
    async with asyncio.timeout(10):
        await BatchJob(context or context_of(directory), row).run()
    return await row_of(directory, row["number"])


@pytest.mark.parametrize(
    ("states", "end"),
    [
        ([], BatchState.FAILED),
        ([BatchState.IN_PROGRESS], BatchState.FAILED),
        ([BatchState.IN_PROGRESS, BatchState.CANCELLING], BatchState.CANCELLED),
        ([BatchState.IN_PROGRESS, BatchState.FINALIZING], BatchState.EXPIRED),
    ],
)
@in_loop
async def test_a_batch_whose_input_is_lost_ends_with_what_it_has(
    directory: BatchDirectory, states: list[BatchState], end: BatchState
) -> None:
    row = await begun(directory)
    for state in states:
        columns = {"outcome": "expired"} if state is BatchState.FINALIZING else {"total": 2}
        await directory.run(lambda store: store.advance(row["number"], state, **columns))  # noqa: B023
    if states:
        result = Result(row["number"], 1, True, b"answer\n")
        await directory.run(lambda store: store.add_results([result]))
    directory.path("file-0").unlink()
    found = await ended(directory, row)
    if states:
        assert directory.path(found["output_file_id"]).read_bytes() == b"answer\n"
    assert found["state"] == end.value
    assert (found["errors"] is not None) == (end is BatchState.FAILED)
    assert found["error_file_id"] is None


@in_loop
async def test_a_batch_whose_input_has_lost_its_end_ends_with_what_it_has(
    directory: BatchDirectory,
) -> None:
    row = await begun(directory)
    await advanced(directory, row, BatchState.IN_PROGRESS, total=3)
    results = [Result(row["number"], number, True, b"answer\n") for number in (1, 2)]
    await directory.run(lambda store: store.add_results(results))
    found = await ended(directory, row)
    assert found["state"] == "failed" and "input_file_lost" in found["errors"]
    assert directory.path(found["output_file_id"]).read_bytes() == b"answer\n" * 2


@pytest.mark.parametrize("fault", ["damaged", "unreadable"])
@in_loop
async def test_a_cancelled_batch_ends_whatever_its_input_has_become(
    directory: BatchDirectory, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setattr("router.batches.jobs.AGAIN_S", 0.01)
    row = await begun(directory)
    await advanced(directory, row, BatchState.IN_PROGRESS, BatchState.CANCELLING)
    if fault == "damaged":
        path = directory.path("file-0")
        path.write_bytes(path.read_bytes().replace(b'"custom_id": "b"', b'"custom_id\xff'))
    else:

        def fail(*_: object) -> Any:
            raise OSError(errno.EIO, "a bad sector")

        monkeypatch.setattr("router.batches.lines.read_lines", fail)
    found = await ended(directory, row)
    assert found["state"] == "cancelled"
    if fault == "damaged":
        lines = directory.path(found["error_file_id"]).read_text().splitlines()
        assert [json.loads(each)["custom_id"] for each in lines] == ["a", ""]


@in_loop
async def test_results_are_written_only_where_there_is_room_for_all(
    directory: BatchDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.batches.jobs.AGAIN_S", 0.01)
    free = 6
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=free))
    made: list[str] = []
    write = BatchJob._write_file

    def counted(job: BatchJob, name: str, ok: bool) -> int:
        made.append(name)
        return write(job, name, ok)

    monkeypatch.setattr(BatchJob, "_write_file", counted)
    row = await begun(directory)
    await advanced(directory, row, BatchState.IN_PROGRESS)
    results = [Result(row["number"], number, True, b"answer\n") for number in (1, 2)]
    await directory.run(lambda store: store.add_results(results))
    running = asyncio.create_task(ended(directory, row))
    await asyncio.sleep(0.2)
    assert not made and not running.done()
    free = 10**9
    assert (await running)["state"] == "completed" and len(made) == 2


@in_loop
async def test_a_batch_waits_for_a_disk_that_is_away(
    directory: BatchDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.batches.jobs.AGAIN_S", 0.01)
    row = await begun(directory)
    (tmp_path / "files").rename(tmp_path / "elsewhere")
    running = asyncio.create_task(BatchJob(context_of(directory), row).run())
    await asyncio.sleep(0.1)
    assert (await row_of(directory, row["number"]))["errors"] is None
    (tmp_path / "elsewhere").rename(tmp_path / "files")
    async with asyncio.timeout(10):
        while (await row_of(directory, row["number"]))["total"] != 2:
            await asyncio.sleep(0.01)
    running.cancel()


@pytest.mark.parametrize("validated", [False, True])
@in_loop
async def test_a_batch_expires_while_the_machine_sleeps(
    directory: BatchDirectory, monkeypatch: pytest.MonkeyPatch, validated: bool
) -> None:
    """The event loop's time stands still then, and that of the wall goes on."""
    slept_s = 0.0
    wall = time.time
    monkeypatch.setattr("time.time", lambda: wall() + slept_s)
    monkeypatch.setattr("router.batches.jobs._LOOK_S", 0.02)
    row = await begun(directory)
    if validated:
        await advanced(directory, row, BatchState.IN_PROGRESS)
    else:
        slept_s = 2 * HOUR_S
    running = asyncio.create_task(BatchJob(context_of(directory), row).run())
    await asyncio.sleep(0.05)
    slept_s = 2 * HOUR_S
    async with asyncio.timeout(10):
        await running
    found = await row_of(directory, row["number"])
    assert (found["state"], found["failed"]) == ("expired", 2 * validated)


@in_loop
async def test_a_line_that_may_have_ended_two_engines_gets_no_third_one(
    directory: BatchDirectory,
) -> None:
    calls = 0

    async def endpoint(*_: object) -> None:
        nonlocal calls
        calls += 1
        raise Unavailable("No engine became ready.", code=LOST, retry_after_s=0.01)

    row = await begun(directory)
    await advanced(directory, row, BatchState.IN_PROGRESS)
    context = context_of(directory)
    context.places, context.is_young = Places(1), False
    context.endpoints = {row["endpoint"]: endpoint}
    context.tenant_named = lambda name: EVERYBODY
    counter = SimpleNamespace(inc=lambda: None)
    context.metrics = SimpleNamespace(batch_lines=SimpleNamespace(labels=lambda *_: counter))
    found = await ended(directory, row, context)
    assert (found["state"], found["failed"], calls) == ("completed", 2, 2 * MAX_GONE)
    for each in directory.path(found["error_file_id"]).read_text().splitlines():
        assert json.loads(each)["response"]["body"]["error"]["code"] == "engine_lost"


# -- uploads -------------------------------------------------------------------

FORM = (
    b'--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--x\r\n'
    b'content-disposition: form-data; name="file"; filename="f"\r\n\r\nhello\r\n--x--\r\n'
)


def upload_of(body: bytes, tenant: Tenant = EVERYBODY) -> Request:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    headers = [(b"content-type", b"multipart/form-data; boundary=x")]
    scope = {"type": "http", "method": "POST", "path": "/v1/files", "headers": headers}
    return Request({**scope, "state": {"tenant": tenant}}, receive)


@in_loop
async def test_a_file_whose_upload_is_cut_off_at_the_end_is_there_if_it_is_known(
    directory: BatchDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    adding, may_go = threading.Event(), threading.Event()
    add_file = BatchStore.add_file

    def add_late(store: BatchStore, new: NewFile) -> Any:
        adding.set()
        may_go.wait(10)
        return add_file(store, new)

    monkeypatch.setattr(BatchStore, "add_file", add_late)
    endpoints = FileEndpoints(context_of(directory))
    uploading = asyncio.create_task(endpoints.upload(upload_of(FORM)))
    await asyncio.to_thread(adding.wait, 10)
    uploading.cancel()
    await asyncio.wait([uploading])
    may_go.set()
    (known,) = await directory.run(lambda store: store.file_ids())
    await directory.discard("file-of-nobody")  # after what the upload has given up
    assert directory.path(known).read_bytes() == b"hello"


@in_loop
async def test_an_upload_that_only_trickles_is_given_up(
    directory: BatchDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.batches.files._PIECE_TIMEOUT_S", 0.2)
    monkeypatch.setattr("router.batches.files._PIECE_BYTES", 2000)

    async def pieces(size: int, wait_s: float, count: int) -> AsyncIterator[bytes]:
        for _ in range(count):
            await asyncio.sleep(wait_s)
            yield b"x" * size

    async def receive(size: int, wait_s: float, count: int) -> None:
        endpoints = FileEndpoints(context_of(directory))
        upload = Upload(b"x", BytesIO(), 10**6)
        upload.feed(FORM[: FORM.index(b"hello")])
        request: Any = SimpleNamespace(stream=lambda: pieces(size, wait_s, count))
        await endpoints._receive(request, upload)

    with pytest.raises(BodyTimeout):
        await receive(1, 0.03, 100)
    await receive(1000, 0.03, 30)  # slow, but not that slow


@in_loop
async def test_some_places_of_uploads_stay_free_for_other_keys(directory: BatchDirectory) -> None:
    endpoints = FileEndpoints(context_of(directory))
    held = list[Any]()

    def places_of(number: int) -> int:
        tenant = Tenant(name=f"key{number}", alone=False)
        for count in range(9):
            places = endpoints._counted(tenant)
            try:
                places.__enter__()
            except TooManyRequests:
                return count
            held.append(places)
        return 9

    found = [places_of(number) for number in range(6)]
    assert found[:3] == [4, 4, 4] and all(found)
