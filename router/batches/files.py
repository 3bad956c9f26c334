"""`/v1/files`: input files of batches, and the result files that batches write."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from router.api.body import json_response
from router.batches.jobs.context import BatchContext
from router.batches.objects import (
    MAX_EXPIRY_S,
    MIN_EXPIRY_S,
    DeletedFile,
    FileList,
    FileObject,
)
from router.batches.queries import (
    FileNotFound,
    page_query,
    required,
    run_store,
    storage_failed,
)
from router.batches.storage.store import RESULT_FILES, BatchStore, NewFile, Row
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
_SILENCE_S = 30.0
_MIN_BYTES_S = 8000
"""Min speed of an upload. A slower one is aborted after this long, because it occupies one of
few places."""
_DISCARD_S = 2.0
_PIECE_BYTES = 256 * 1024
_MAX_UPLOADS, _MAX_UPLOADS_OF_KEY = 16, 4
_MAX_PAGE_FILES = 10_000
_Result = TypeVar("_Result")


class FileEndpoints:
    """The handlers."""

    def __init__(self, context: BatchContext) -> None:
        self._context = context
        self._directory = context.directory
        self._uploads = FairShares()

    async def upload(self, request: Request) -> Response:
        context, tenant = self._context, request.state.tenant
        _check_origin(request.headers)
        boundary = boundary_of(request.headers.get("content-type"))
        await self._check_room(tenant, request.headers)
        file_id = self._directory.new_id()
        path = self._directory.new_path(file_id)
        with self._counted(tenant):
            max_bytes = context.settings.batch_file_mb * _MB
            try:
                upload = await self._directory.read(partial(Upload, boundary, path, max_bytes))
                try:
                    await self._receive(request, upload)
                    new = _new_file(file_id, tenant, upload, context.keep_s)
                    await self._directory.read(upload.finish)
                finally:
                    await self._directory.read(upload.close)
                await self._directory.read(partial(self._directory.publish, file_id))
                row = await self._run(lambda store: self._add(store, new))
            except BaseException as error:
                discarded = self._directory.discard(file_id)
                if not isinstance(error, asyncio.CancelledError):
                    await discarded
                if isinstance(error, OSError):
                    raise storage_failed(error) from None
                raise
        return json_response(file_object(row))

    async def list_all(self, request: Request) -> Response:
        limit, after, newest_first = page_query(request, _MAX_PAGE_FILES, _MAX_PAGE_FILES)
        purpose, key = request.query_params.get("purpose"), request.state.tenant.name
        found = await self._run(
            lambda store: store.page(
                "files", key, limit, after=after, newest_first=newest_first, purpose=purpose
            )
        )
        rows, has_more = required(found, "file", after)
        data = [file_object(row) for row in rows]
        first_id, last_id = (data[0].id, data[-1].id) if data else (None, None)
        return json_response(
            FileList(data=data, first_id=first_id, last_id=last_id, has_more=has_more)
        )

    async def retrieve(self, request: Request) -> Response:
        return json_response(file_object(await self._find(request)))

    async def content(self, request: Request) -> Response:
        row = await self._find(request)
        path = self._directory.path(row["id"])
        try:
            await self._directory.read(path.stat)
        except OSError as error:
            raise storage_failed(error) from None
        headers = {"content-length": str(row["bytes"])}
        return StreamingResponse(
            self._pieces(path), headers=headers, media_type="application/octet-stream"
        )

    async def delete(self, request: Request) -> Response:
        key, file_id = request.state.tenant.name, request.path_params["file_id"]

        def delete(store: BatchStore) -> None:
            required(store.find_file(key, file_id), "file", file_id)
            if (batch := store.user_of(file_id)) is not None:
                raise InvalidRequest(
                    f"{batch} reads this file: cancel the batch first.", code="file_in_use"
                )
            store.delete_file(key, file_id)

        await self._run(delete)
        await self._directory.read(partial(self._directory.remove, file_id))
        return json_response(DeletedFile(id=file_id))

    async def _find(self, request: Request) -> Row:
        key, file_id = request.state.tenant.name, request.path_params["file_id"]
        row = await self._run(lambda store: store.find_file(key, file_id))
        return required(row, "file", file_id)

    async def _pieces(self, path: Path) -> AsyncIterator[bytes]:
        """Yield the content of a file. It is opened for each piece, because clients that do not
        read could otherwise use up the descriptors of this process. Raises `FileNotFound` and
        `StorageFailed`."""
        start = 0
        try:
            while piece := await self._directory.read(partial(_read_piece, path, start)):
                start += len(piece)
                yield piece
        except FileNotFoundError:
            raise FileNotFound("The file was deleted during its download.") from None
        except OSError as error:
            raise storage_failed(error) from None

    # -- uploads ---------------------------------------------------------------

    async def _receive(self, request: Request, upload: Upload) -> None:
        """Pass the body on, piece by piece. Raises what `Upload.feed` raises, and `BodyTimeout`."""
        parts: list[bytes] = []
        size = 0  # of these; to add it up for each of many small ones would hold the event loop
        ahead_s = 0.0  # of the slowest client that is accepted
        chunks = aiter(request.stream())
        try:
            while True:
                began = time.monotonic()
                async with asyncio.timeout(min(_SILENCE_S, _SILENCE_S + ahead_s)):
                    chunk = await anext(chunks, None)
                took_s = time.monotonic() - began
                ahead_s = min(_SILENCE_S, ahead_s + len(chunk or b"") / _MIN_BYTES_S - took_s)
                if chunk:
                    parts.append(chunk)
                    size += len(chunk)
                if parts and (chunk is None or size >= _PIECE_BYTES):
                    await self._directory.read(partial(upload.feed, b"".join(parts)))
                    parts.clear()
                    size = 0
                if chunk is None:
                    return
        except TimeoutError:
            raise BodyTimeout(
                f"The upload is too slow: nothing for {_SILENCE_S:g} s, or fewer than "
                f"{_MIN_BYTES_S} bytes a second."
            ) from None
        except ClientDisconnect:
            raise ClientDisconnected from None
        except BodyTooLarge:
            await _discard(chunks)
            raise

    async def _check_room(self, tenant: Tenant, headers: Headers) -> None:
        """Raise `ApiError` if ``tenant`` may not have another file."""
        settings = self._context.settings
        count, used = await self._run(lambda store: store.use_of(tenant.name))
        check_count(count + 1, settings.batch_max_files)
        length = headers.get("content-length", "0")
        if used + (int(length) if length.isdecimal() else 0) > self._context.max_bytes:
            raise _storage_full(settings.batch_max_mb)

    def _add(self, store: BatchStore, new: NewFile) -> Row:
        """Add an uploaded file. Others may have been added in the meantime."""
        count, used = store.use_of(new.key)
        check_count(count + 1, self._context.settings.batch_max_files)
        if used + new.bytes > self._context.max_bytes:
            raise _storage_full(self._context.settings.batch_max_mb)
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

    async def _run(self, work: Callable[[BatchStore], _Result]) -> _Result:
        return await run_store(self._context, work)


def _read_piece(path: Path, start: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        return file.read(_PIECE_BYTES)


def file_object(row: Row) -> FileObject:
    return FileObject(
        id=row["id"],
        bytes=row["bytes"],
        created_at=row["created_at"],
        expires_at=row["expires_at"],
        filename=row["filename"],
        purpose=row["purpose"],
    )


def _new_file(file_id: str, tenant: Tenant, upload: Upload, keep_s: int) -> NewFile:
    """Return the file received by ``upload``. Raises `InvalidRequest`."""
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


def _storage_full(limit_mb: int) -> InvalidRequest:
    return InvalidRequest(
        f"The files of this API key may have {limit_mb} MB in total: delete some.",
        code="storage_full",
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
