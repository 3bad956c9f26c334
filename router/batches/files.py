"""`/v1/files`: input files of batches, and the result files that batches write."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from router.api.body import json_response
from router.api.pages import newest_first, page_limit
from router.batches.context import BatchContext
from router.batches.objects import (
    MAX_EXPIRY_S,
    MIN_EXPIRY_S,
    BatchList,
    DeletedFile,
    FileList,
    FileObject,
)
from router.batches.store import RESULT_FILES, BatchStore, FileNotFound, NewFile, Row
from router.batches.uploads import Upload, boundary_of
from router.errors import (
    BodyTimeout,
    BodyTooLarge,
    ClientDisconnected,
    Forbidden,
    InvalidRequest,
    InvalidValue,
    TooManyRequests,
)
from router.fair_shares import FairShares
from router.fleet.tenants.tenant import Tenant

_MB = 1_000_000
_PIECE_BYTES = 256 * 1024
_PIECE_TIMEOUT_S = 32.0
"""Max time for a piece of an upload to arrive. A client slower than 8,000 bytes per second is cut
off, because it occupies one of few places."""
_DISCARD_S = 2.0
_MAX_UPLOADS, _MAX_UPLOADS_OF_KEY = 16, 4
_MAX_PAGE_FILES = 10_000


class FileEndpoints:
    """The handlers."""

    def __init__(self, context: BatchContext) -> None:
        self._context = context
        self._directory = context.directory
        self._uploads = FairShares()

    async def upload(self, request: Request) -> Response:
        directory, tenant = self._directory, request.state.tenant
        _check_origin(request.headers)
        boundary = boundary_of(request.headers.get("content-type"))
        announced = request.headers.get("content-length", "0")
        size = int(announced) if announced.isdecimal() else 0
        await directory.run(lambda store: self._check_room(store, tenant.name, size))
        file_id, max_bytes = directory.new_id(), self._context.settings.batch_file_mb * _MB
        with self._counted(tenant):
            try:
                file = await directory.read(partial(directory.create, file_id))
                try:
                    upload = Upload(boundary, file, max_bytes)
                    await self._receive(request, upload)
                    new = _new_file(file_id, tenant, upload, self._context.keep_s)
                    await directory.read(partial(directory.finish, file))
                finally:
                    await directory.read(partial(_close, file))
                row = await directory.run(lambda store: self._add(store, new))
            except BaseException as error:
                discarded = directory.discard(file_id)
                if not isinstance(error, asyncio.CancelledError):
                    await discarded
                raise
        return json_response(file_object(row))

    async def list_all(self, request: Request) -> Response:
        limit = page_limit(request, _MAX_PAGE_FILES, _MAX_PAGE_FILES)
        purpose = request.query_params.get("purpose")
        return await page_of(self._context, request, FileList, file_object, limit, purpose)

    async def retrieve(self, request: Request) -> Response:
        return json_response(file_object(await self._find(request)))

    async def content(self, request: Request) -> Response:
        row = await self._find(request)
        path = self._directory.path(row["id"])
        await self._directory.read(path.stat)
        headers = {"content-length": str(row["bytes"])}
        return StreamingResponse(
            self._pieces(path), headers=headers, media_type="application/octet-stream"
        )

    async def delete(self, request: Request) -> Response:
        key, file_id = request.state.tenant.name, request.path_params["file_id"]

        def delete(store: BatchStore) -> None:
            store.find_file(key, file_id)
            if (batch := store.user_of(file_id)) is not None:
                raise InvalidRequest(
                    f"{batch} reads this file: cancel the batch first.", code="file_in_use"
                )
            store.delete_file(key, file_id)

        await self._directory.run(delete)
        await self._directory.read(partial(self._directory.remove, file_id))
        return json_response(DeletedFile(id=file_id))

    async def _find(self, request: Request) -> Row:
        key, file_id = request.state.tenant.name, request.path_params["file_id"]
        return await self._directory.run(lambda store: store.find_file(key, file_id))

    async def _pieces(self, path: Path) -> AsyncIterator[bytes]:
        """Yield the content of a file. It is opened for each piece, because clients that do not
        read could otherwise use up the descriptors of this process. Raises `FileNotFound` and
        `StorageFailed`."""
        start = 0
        while piece := await self._directory.read(partial(_read_piece, path, start)):
            start += len(piece)
            yield piece

    # -- uploads ---------------------------------------------------------------

    async def _receive(self, request: Request, upload: Upload) -> None:
        """Pass the body on, piece by piece. Raises what `Upload.feed` raises, and `BodyTimeout`."""
        chunks = request.stream()
        try:
            while True:
                async with asyncio.timeout(_PIECE_TIMEOUT_S):
                    piece = await _next_piece(chunks)
                if not piece:
                    return
                await self._directory.read(partial(upload.feed, piece))
        except TimeoutError:
            raise BodyTimeout(
                f"The upload is too slow: {_PIECE_BYTES} bytes did not arrive within "
                f"{_PIECE_TIMEOUT_S:g} s."
            ) from None
        except ClientDisconnect:
            raise ClientDisconnected from None
        except BodyTooLarge:
            await _discard(chunks)
            raise

    def _check_room(self, store: BatchStore, key: str, size: int) -> None:
        """Raise `InvalidRequest` if ``key`` may not have another file, of ``size`` bytes."""
        settings = self._context.settings
        count, used = store.use_of(key)
        check_count(count + 1, settings.batch_max_files)
        if used + size > self._context.max_bytes:
            raise InvalidRequest(
                f"The files of this API key may have {settings.batch_max_mb} MB in total: delete "
                "some.",
                code="storage_full",
            )

    def _add(self, store: BatchStore, new: NewFile) -> Row:
        """Add an uploaded file. Others may have been added in the meantime."""
        self._check_room(store, new.key, new.bytes)
        return store.add_file(new)

    @contextmanager
    def _counted(self, tenant: Tenant) -> Iterator[None]:
        has_room = self._uploads.has_room(tenant.share, _MAX_UPLOADS, alone=tenant.alone)
        if not has_room or self._uploads.of(tenant.share) >= _MAX_UPLOADS_OF_KEY:
            raise TooManyRequests("Too many files are being uploaded at once.", retry_after_s=5)
        self._uploads.take(tenant.share)
        try:
            yield
        finally:
            self._uploads.give_back(tenant.share)


async def page_of(
    context: BatchContext,
    request: Request,
    list_type: type[FileList] | type[BatchList],
    make: Callable[[Row], Any],
    limit: int,
    purpose: str | None = None,
) -> Response:
    """Return a page of files or batches, each made of its row. Raises `InvalidValue` and
    `NotFound`."""
    newest, after = newest_first(request), request.query_params.get("after")
    table, key = "files" if list_type is FileList else "batches", request.state.tenant.name
    rows, has_more = await context.directory.run(
        lambda store: store.page(
            table, key, limit, after=after, newest_first=newest, purpose=purpose
        )
    )
    data = [make(row) for row in rows]
    first_id, last_id = (data[0].id, data[-1].id) if data else (None, None)
    return json_response(
        list_type(data=data, first_id=first_id, last_id=last_id, has_more=has_more)
    )


def _read_piece(path: Path, start: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(start)
            return file.read(_PIECE_BYTES)
    except FileNotFoundError:
        raise FileNotFound("The file was deleted during its download.") from None


async def _next_piece(chunks: AsyncIterator[bytes]) -> bytes:
    """Return the next bytes of a body, at least `_PIECE_BYTES` except at the end."""
    parts: list[bytes] = []
    size = 0
    async for chunk in chunks:
        parts.append(chunk)
        size += len(chunk)
        if size >= _PIECE_BYTES:
            break
    return b"".join(parts)


def file_object(row: Row) -> FileObject:
    return msgspec.convert(row, FileObject)


def _close(file: BinaryIO) -> None:
    with suppress(OSError):  # the disk is full, and the file is removed
        file.close()


def _new_file(file_id: str, tenant: Tenant, upload: Upload, keep_s: int) -> NewFile:
    """Return the file received by ``upload``. Raises `InvalidRequest`."""
    upload.check()
    fields = upload.fields
    if fields.get("purpose") != "batch":
        raise InvalidValue("'purpose' must be batch, the only supported purpose.", param="purpose")
    expiry_s = keep_s
    if "expires_after[seconds]" in fields or "expires_after[anchor]" in fields:
        seconds = fields.get("expires_after[seconds]", "")
        if fields.get("expires_after[anchor]") != "created_at":
            raise InvalidValue(
                "'expires_after[anchor]' must be created_at.", param="expires_after[anchor]"
            )
        if not re.fullmatch(r"\d{1,8}", seconds) or not (
            MIN_EXPIRY_S <= int(seconds) <= MAX_EXPIRY_S
        ):
            raise InvalidValue(
                f"'expires_after[seconds]' must be between {MIN_EXPIRY_S} and {MAX_EXPIRY_S}.",
                param="expires_after[seconds]",
            )
        expiry_s = min(int(seconds), keep_s)
    now, filename = int(time.time()), upload.filename or ""
    return NewFile(file_id, tenant.name, filename, "batch", upload.size, now, now + expiry_s)


def _check_origin(headers: Headers) -> None:
    """Any web page can post a form to any server without permission: without a key it could fill
    the disk."""
    if "origin" in headers and not {"authorization", "x-api-key"} & set(headers.keys()):
        raise Forbidden("Uploads from web pages require an API key.", code="key_needed")


def check_count(count: int, limit: int) -> None:
    """Raise `InvalidRequest` if ``count`` files of a key are too many."""
    if count > limit:
        raise InvalidRequest(
            f"This API key may have {limit} files, including the {RESULT_FILES} that each "
            "unfinished batch may write: delete some.",
            code="too_many_files",
        )


async def _discard(chunks: AsyncIterator[bytes]) -> None:
    """Keep reading for a moment: closing while the client is still sending resets the connection,
    and the client would never see the answer."""
    try:
        async with asyncio.timeout(_DISCARD_S):
            while await anext(chunks, None) is not None:
                pass
    except (TimeoutError, ClientDisconnect):
        pass
