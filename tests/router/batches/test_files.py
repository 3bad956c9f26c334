"""Uploads, lists and contents of files."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from starlette.types import Message

from router.batches.uploads import Upload
from router.errors import InvalidRequest
from router.fleet.router import Router
from router.http.app import create_app
from router.http.middleware.api_keys import ApiKeys
from shared.settings import Settings
from tests.conftest import in_loop
from tests.router.batches.conftest import ASKED, BatchClient, line
from tests.router.conftest import Server, StartServer, error_of, eventually, key_flag, ok

FORM = "multipart/form-data; boundary=x"


def test_a_file_is_kept_as_it_is(batches: BatchClient) -> None:
    content = bytes(range(256)) * 3000
    made = batches.api.files.create(file=("../a b.jsonl", content), purpose="batch")
    assert (made.bytes, made.purpose, made.status) == (len(content), "batch", "processed")
    assert made.filename == "a b.jsonl"
    assert batches.api.files.retrieve(made.id) == made
    assert batches.api.files.content(made.id).read() == content
    assert batches.api.files.delete(made.id).deleted
    for again in (batches.api.files.retrieve, batches.api.files.content, batches.api.files.delete):
        with pytest.raises(openai.NotFoundError):
            again(made.id)


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_download_that_nobody_reads_holds_no_file_open(
    batches: BatchClient, server: Server, batch_dir: Path
) -> None:
    file_id = batches.upload(b"x" * 1_900_000)
    with ExitStack() as stack:
        for _ in range(3):
            url = f"{batches.api.base_url}files/{file_id}/content"
            stack.enter_context(httpx.stream("GET", url))
        time.sleep(0.2)
        open_files = map(os.readlink, Path(f"/proc/{server.process.pid}/fd").iterdir())
        assert not [each for each in open_files if "/files/" in each]
    assert batches.api.files.content(file_id).read() == b"x" * 1_900_000


@in_loop
async def test_a_download_of_a_file_that_is_deleted_is_cut_off(
    socket_dir: Path, tmp_path: Path
) -> None:
    router = Router(Settings(batch_dir=tmp_path), [f"ipc://{socket_dir}/engines"], "test")
    app = create_app(router, ApiKeys(router.settings))
    parts: Any = {"data": {"purpose": "batch"}, "files": {"file": bytes(600_000)}}
    asgi = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=asgi, base_url="http://localhost") as client:
        file_id = (await client.post("/v1/files", **parts)).json()["id"]
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)
        if message["type"] == "http.response.body":
            (tmp_path / "files" / file_id).unlink()

    scope = {"type": "http", "method": "GET", "path": f"/v1/files/{file_id}/content"}
    await app({**scope, "query_string": b"", "headers": []}, asyncio.Event().wait, send)  # type: ignore[arg-type]
    assert [each["type"] for each in sent] == ["http.response.start", "http.response.body"]
    for close in (router.engine_sockets.close, *router.closers):
        close()


def test_names_on_the_disk_are_the_servers_own(batches: BatchClient, batch_dir: Path) -> None:
    made = batches.api.files.create(file=("../../evil", b"x"), purpose="batch")
    assert (batch_dir / "files" / made.id).read_bytes() == b"x"
    assert not list(batch_dir.rglob("*evil*"))
    assert (batch_dir / "files").stat().st_mode & 0o77 == 0
    for path in ("..%2fbatches.db", "%2e%2e", "file-0"):
        assert httpx.get(f"{batches.api.base_url}files/{path}/content").status_code == 404


def test_files_are_listed_in_pages(batches: BatchClient) -> None:
    made = [batches.upload(b"x") for _ in range(5)]
    first = batches.api.files.list(limit=2)
    assert [each.id for each in first.data] == made[:2:-1] and first.has_more
    assert [each.id for each in batches.api.files.list(limit=2)][:5] == made[::-1]
    oldest = batches.api.files.list(limit=10_000, order="asc", purpose="batch")
    assert [each.id for each in oldest.data][-5:] == made
    assert not batches.api.files.list(purpose="batch_output", limit=1).data


@pytest.mark.parametrize("path", ["files", "batches"])
@pytest.mark.parametrize("limit", ["0", "10001", "0000019", "000001" + "9" * 20, "1" * 5000, "٣"])
def test_a_limit_that_is_none_is_refused(server: Server, path: str, limit: str) -> None:
    answer = server.client.get(f"/v1/{path}", params={"limit": limit})
    assert error_of(answer)["param"] == "limit"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"purpose": "fine-tune"}, "purpose"),
        ({}, "purpose"),
        ({"purpose": "batch", "expires_after[anchor]": "created_at"}, "expires_after[seconds]"),
        ({"purpose": "batch", "expires_after[seconds]": "4000"}, "expires_after[anchor]"),
    ],
)
def test_a_bad_form_is_refused(
    server: Server, batches: BatchClient, batch_dir: Path, fields: Any, param: str
) -> None:
    answer = server.client.post("/v1/files", data=fields, files={"file": b"x"})
    assert error_of(answer)["param"] == param
    assert not batches.leftovers(batch_dir)


def test_a_file_expires_when_its_owner_says(batches: BatchClient) -> None:
    expiry: Any = {"anchor": "created_at", "seconds": 3600}
    made = batches.api.files.create(file=b"x", purpose="batch", expires_after=expiry)
    assert made.expires_at is not None
    assert made.expires_at - made.created_at == 3600


PART = b'--x\r\ncontent-disposition: form-data; name="a"\r\n\r\n'


@pytest.mark.parametrize(
    ("status", "content", "kind"),
    [
        (415, b"{}", "application/json"),
        (415, b"", "x"),
        *((400, content, FORM) for content in (b"", b"rubbish", b"--x\r\n", b"--x\r\n\r\nno end")),
        (400, PART + b"y" * 5000 + b"\r\n--x--", FORM),
        (400, (PART + b"1\r\n") * 40 + b"--x--", FORM),
    ],
)
def test_what_is_no_form_is_refused(server: Server, status: int, content: bytes, kind: str) -> None:
    answer = server.client.post("/v1/files", content=content, headers={"content-type": kind})
    assert answer.status_code == status


@pytest.mark.parametrize(
    "rest",
    [
        pytest.param(b"\r\n--x" + b" " * 100_000, id="padding"),
        pytest.param(b"\r\n--x\rx" * 2, id="line feed missing"),
        pytest.param(b"\r\n--x-x" * 2, id="hyphen missing"),
        pytest.param(b"\r\n--xy" * 2, id="longer"),
        pytest.param(b"\r\n--x--" + b"after" * 10_000, id="after the end"),
    ],
)
@pytest.mark.parametrize("piece_bytes", [1, 100_000])
def test_a_body_must_be_cheap_to_read(rest: bytes, piece_bytes: int) -> None:
    head = b'--x\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\n'
    body = head + b"content" + rest
    upload = Upload(b"x", BytesIO(), 10**6)
    with pytest.raises(InvalidRequest, match=r"boundary|besides"):
        for at in range(0, len(body), piece_bytes):
            upload.feed(body[at : at + piece_bytes])


def test_a_page_of_a_browser_cannot_upload_without_a_key(server: Server) -> None:
    form: Any = {"data": {"purpose": "batch"}, "files": {"file": b"x"}}
    page = {"origin": "https://evil.example"}
    assert server.client.post("/v1/files", headers=page, **form).status_code == 403


def test_a_file_may_come_in_small_pieces(batches: BatchClient, server: Server) -> None:
    content = bytes(range(256)) * 4000
    form = [
        b'--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--x\r\n',
        b'content-disposition: form-data; name="file"; filename="a"\r\n\r\n',
        *(content[at : at + 1000] for at in range(0, len(content), 1000)),
        b"\r\n--x--\r\n",
    ]
    headers = {"content-type": FORM}
    answer = ok(server.client.post("/v1/files", content=iter(form), headers=headers))
    assert batches.api.files.content(answer.json()["id"]).read() == content


def test_a_large_file_is_refused_and_nothing_is_left(batches: BatchClient, batch_dir: Path) -> None:
    with pytest.raises(openai.APIStatusError) as refused:
        batches.upload(b"x" * 2_000_001)
    assert refused.value.status_code == 413
    assert not batches.leftovers(batch_dir)
    assert batches.upload(b"x" * 2_000_000)


def begin_upload(server: Server) -> socket.socket:
    """Send the first part of a file."""
    at = urlsplit(server.url)
    client = socket.create_connection((at.hostname or "", at.port or 0))
    client.sendall(
        b"POST /v1/files HTTP/1.1\r\nhost: localhost\r\ncontent-length: 900000\r\n"
        b"content-type: multipart/form-data; boundary=x\r\n\r\n"
        b'--x\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\n%s'
        % (b"x" * 600_000)
    )
    return client


def test_an_upload_that_breaks_off_leaves_nothing(
    batches: BatchClient, server: Server, batch_dir: Path
) -> None:
    with begin_upload(server):
        eventually(lambda: bool(batches.leftovers(batch_dir)))
    eventually(lambda: not batches.leftovers(batch_dir))


def test_few_files_are_uploaded_at_once(
    batches: BatchClient, server: Server, batch_dir: Path
) -> None:
    with ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(begin_upload(server))
        eventually(lambda: len(batches.leftovers(batch_dir)) == 4)
        with pytest.raises(openai.RateLimitError, match="at once"):
            batches.upload(b"x")
    eventually(lambda: not batches.leftovers(batch_dir))
    assert batches.upload(b"x")


def refused(call: Callable[..., Any], *args: Any) -> str | None:
    """Return the code of the error with which a call is refused."""
    with pytest.raises(openai.BadRequestError) as caught:
        call(*args)
    return caught.value.code


def test_a_file_that_a_batch_reads_is_not_deleted(batches: BatchClient) -> None:
    batch = batches.create([line("a")], completion_window="2s")  # there is no engine
    assert refused(batches.api.files.delete, batch.input_file_id) == "file_in_use"
    batches.wait(batch)
    batches.api.files.delete(batch.input_file_id)


def test_a_key_sees_and_fills_only_its_own(start_server: StartServer, tmp_path: Path) -> None:
    keys, directory = key_flag(tmp_path, "sk-a name=a", "sk-b name=b"), tmp_path / "d"
    limits = ("--batch-max-files=3", "--batch-max-mb=1")
    server = start_server(keys, f"--batch-dir={directory}", *limits)
    one, other = BatchClient(server.url, "sk-a"), BatchClient(server.url, "sk-b")
    batch = one.create([line("a")])
    files, batches = other.api.files, other.api.batches
    calls: list[tuple[Any, ...]] = [(batches.retrieve, batch.id), (batches.cancel, batch.id)]
    of_file = (files.retrieve, files.content, files.delete, other.create_of)
    for call, name in (*calls, *((each, batch.input_file_id) for each in of_file)):
        with pytest.raises(openai.NotFoundError):
            call(name)
    assert not files.list().data and not batches.list().data
    assert refused(one.upload, b"x") == "too_many_files"  # the batch may write two files
    one.api.batches.cancel(batch.id)
    one.wait(batch)
    assert len(one.api.files.list().data) == 2, "the batch has no answers"
    one.upload(b"x")
    assert refused(one.upload, b"x") == "too_many_files"
    assert refused(one.create_of, batch.input_file_id) == "too_many_files"
    assert refused(other.upload, b"x" * 1_000_001) == "storage_full"
    assert other.upload(b"x" * 900_000)
    with pytest.raises(openai.AuthenticationError):
        BatchClient(server.url, "sk-c").upload(b"x")


def test_without_a_directory_the_error_says_what_to_set(start_server: StartServer) -> None:
    server = start_server()
    for path in ("/v1/files", "/v1/batches", "/v1/batches/batch_0/cancel"):
        assert "--batch-dir" in error_of(server.post(path), 501)["message"]


def test_a_removed_directory_takes_nothing(start_server: StartServer, tmp_path: Path) -> None:
    """It would be lost at the next start, though SQLite writes it without an error."""
    directory = tmp_path / "batches"
    server = start_server(f"--batch-dir={directory}")
    file_id = BatchClient(server.url).upload([line("a")])
    shutil.rmtree(directory)
    created = server.post("/v1/batches", input_file_id=file_id, **ASKED)
    form: Any = {"files": {"file": ("x.jsonl", b"{}\n")}, "data": {"purpose": "batch"}}
    for answer in (created, server.client.post("/v1/files", **form)):
        error = error_of(answer, 503)
        assert error["code"] == "storage_failed" and str(tmp_path) not in error["message"]
    assert "its directory was removed; restart the router" in server.log.read_text()


@pytest.mark.usefixtures("server")
def test_a_directory_has_one_router(start_server: StartServer, batch_dir: Path) -> None:
    file = batch_dir / "batches.db"
    for path, said in ((batch_dir, "another router uses"), (file, "--batch-dir")):
        with pytest.raises(AssertionError, match=said):
            start_server(f"--batch-dir={path}")
