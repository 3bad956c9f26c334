"""`/v1/batches`, and the table of endpoints for files and batches."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from router.api.body import json_response, read_body
from router.api.operations import Operation
from router.api.pages import page_limit
from router.batches.context import BatchContext
from router.batches.directory import BatchDirectory
from router.batches.files import FileEndpoints, check_count, page_of
from router.batches.jobs import BatchRunner
from router.batches.objects import (
    BatchList,
    BatchObject,
    CreateBatch,
    DeletedFile,
    FileList,
    FileObject,
)
from router.batches.store import (
    CANCELLABLE,
    RESULT_FILES,
    BatchNotFound,
    BatchState,
    BatchStore,
    FileNotFound,
    Row,
    StorageFailed,
)
from router.errors import BODY_ERRORS, InvalidRequest, TooManyRequests
from router.fleet.router import Router
from router.fleet.tenants.tenant import Tenant
from router.places import Places

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
"""The endpoints that batches may use."""
MAX_UNFINISHED = 100
"""Max unfinished batches per key."""
_PAGE_BATCHES, _MAX_PAGE_BATCHES = 20, 100
_TAG = "OpenAI batches"


class UploadForm(Struct, frozen=True):
    """The parts of an upload."""

    file: Annotated[str, Meta(extra_json_schema={"format": "binary"})]
    purpose: Literal["batch"]


class Batches:
    """The handlers. They stop with the router, but their state is kept."""

    def __init__(
        self,
        router: Router,
        endpoints: Mapping[str, ASGIApp],
        tenant_named: Callable[[str], Tenant | None],
    ) -> None:
        """``endpoints`` process lines, by path. Raises `BatchDirectoryError`."""
        assert router.settings.batch_dir is not None
        on_error = router.metrics.batch_store_errors.inc
        directory = BatchDirectory(router.settings.batch_dir.expanduser(), on_error)
        self._router = router
        self.context = BatchContext(
            directory=directory,
            endpoints=endpoints,
            tenant_named=tenant_named,
            settings=router.settings,
            metrics=router.metrics,
            figures=router.batches,
            places=Places(router.settings.max_batch_requests),
        )
        self._runner = BatchRunner(self.context, router.ending)
        router.background.append(self._runner.run)
        router.closers.append(directory.close)

    async def create(self, request: Request) -> Response:
        body, _ = await read_body(request, self._router, CreateBatch)
        key, now = request.state.tenant.name, int(time.time())
        values = {
            "id": f"batch_{uuid.uuid4().hex}",
            "key": key,
            "endpoint": body.endpoint,
            "input_file_id": body.input_file_id,
            "completion_window": body.completion_window,
            "metadata": None if body.metadata is None else _json(body.metadata),
            "file_expiry_s": body.output_expires_after and body.output_expires_after.seconds,
            "created_at": now,
            "expires_at": now + body.window_s,
        }

        def add(store: BatchStore) -> Row:
            file = store.find_file(key, body.input_file_id, "input_file_id")
            if file["purpose"] != "batch":
                raise InvalidRequest("This file cannot be used as input.", param="input_file_id")
            if len(store.unfinished(key)) >= MAX_UNFINISHED:
                raise TooManyRequests(
                    f"This API key has reached its limit of {MAX_UNFINISHED} unfinished batches.",
                    code="too_many_batches",
                    retry_after_s=60,
                )
            count, _ = store.use_of(key)
            check_count(count + RESULT_FILES, self.context.settings.batch_max_files)
            return store.add_batch(values)

        row = await self.context.directory.run(add)
        self._runner.begin(row)
        await self.context.refresh()
        return json_response(batch_object(row))

    async def retrieve(self, request: Request) -> Response:
        key, batch_id = request.state.tenant.name, request.path_params["batch_id"]
        row = await self.context.directory.run(lambda store: store.find_batch(key, batch_id))
        return json_response(batch_object(row))

    async def list_all(self, request: Request) -> Response:
        limit = page_limit(request, _PAGE_BATCHES, _MAX_PAGE_BATCHES)
        return await page_of(self.context, request, BatchList, batch_object, limit)

    async def cancel(self, request: Request) -> Response:
        key, batch_id = request.state.tenant.name, request.path_params["batch_id"]

        def cancel(store: BatchStore) -> Row:
            row = store.find_batch(key, batch_id)
            state = BatchState(row["state"])
            if state not in (*CANCELLABLE, BatchState.CANCELLING):
                raise InvalidRequest(
                    f"A batch with the status '{state.value}' cannot be cancelled.",
                    code="batch_not_cancellable",
                )
            store.advance(row["number"], BatchState.CANCELLING)
            return store.find_batch(key, batch_id)

        row = await self.context.directory.run(cancel)
        self._runner.cancel(row["number"])
        return json_response(batch_object(row))

    @property
    def operations(self) -> list[Operation]:
        return [*_file_operations(FileEndpoints(self.context)), *_batch_operations(self)]


def batch_object(row: Row) -> BatchObject:
    input_tokens, output_tokens = row["input_tokens"], row["output_tokens"]
    values = {
        "status": row["state"],
        "errors": row["errors"] and msgspec.json.decode(row["errors"]),
        "metadata": row["metadata"] and msgspec.json.decode(row["metadata"]),
        "request_counts": row,
        "usage": {
            "input_tokens": input_tokens,
            "input_tokens_details": row,
            "output_tokens": output_tokens,
            "output_tokens_details": row,
            "total_tokens": input_tokens + output_tokens,
        },
    }
    return msgspec.convert(row | values, BatchObject)


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _page_fields(most: int) -> dict[str, dict[str, Any]]:
    return {
        "limit": {"type": "integer", "minimum": 1, "maximum": most},
        "after": {"type": "string"},
        "order": {"enum": ["asc", "desc"]},
    }


def _file_operations(files: FileEndpoints) -> list[Operation]:
    one, errors = "/v1/files/{file_id}", (FileNotFound, StorageFailed)
    operation = partial(Operation, tag=_TAG)
    return [
        operation(
            "/v1/files",
            files.upload,
            "Upload a file of requests",
            method="POST",
            body_type=UploadForm,
            body_media_type="multipart/form-data",
            response_type=FileObject,
            errors=(*BODY_ERRORS, TooManyRequests, StorageFailed),
        ),
        operation(
            "/v1/files",
            files.list_all,
            "List files",
            query={**_page_fields(10_000), "purpose": {"type": "string"}},
            response_type=FileList,
            errors=(InvalidRequest, *errors),
        ),
        operation(
            one,
            files.retrieve,
            "Get the description of a file",
            response_type=FileObject,
            errors=errors,
        ),
        operation(
            one,
            files.delete,
            "Delete a file",
            method="DELETE",
            response_type=DeletedFile,
            errors=(InvalidRequest, *errors),
        ),
        operation(
            f"{one}/content",
            files.content,
            "Get the content of a file",
            media_type="application/octet-stream",
            errors=errors,
        ),
    ]


def _batch_operations(batches: Batches) -> list[Operation]:
    one, errors = "/v1/batches/{batch_id}", (BatchNotFound, StorageFailed)
    operation = partial(Operation, tag=_TAG)
    example = {
        "input_file_id": "file-0",
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
    }
    return [
        operation(
            "/v1/batches",
            batches.create,
            "Run the requests of a file in the background",
            method="POST",
            body_type=CreateBatch,
            example=example,
            response_type=BatchObject,
            errors=(*BODY_ERRORS, FileNotFound, TooManyRequests, StorageFailed),
        ),
        operation(
            "/v1/batches",
            batches.list_all,
            "List batches",
            query=_page_fields(_MAX_PAGE_BATCHES),
            response_type=BatchList,
            errors=(InvalidRequest, *errors),
        ),
        operation(
            one,
            batches.retrieve,
            "Get the state of a batch",
            response_type=BatchObject,
            errors=errors,
        ),
        operation(
            f"{one}/cancel",
            batches.cancel,
            "Cancel a batch; its results so far are kept",
            method="POST",
            response_type=BatchObject,
            errors=(InvalidRequest, *errors),
        ),
    ]
