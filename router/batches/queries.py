"""The shared part of the handlers of files and batches."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from starlette.requests import Request

from router.api.pages import newest_first, page_limit
from router.batches.jobs.context import BatchContext
from router.batches.storage.store import BatchStore, StoreFailed
from router.errors import NotFound, Unavailable
from shared.logs import RateLimitedLogger

_Result = TypeVar("_Result")
_warnings = RateLimitedLogger(logging.getLogger(__name__), interval_s=5.0)


class FileNotFound(NotFound, code="file_not_found"):
    """The file does not exist or belongs to another key."""


class BatchNotFound(NotFound, code="batch_not_found"):
    """The batch does not exist or belongs to another key."""


class StorageFailed(Unavailable, code="storage_failed"):
    """The server's disk is full or fails."""


async def run_store(context: BatchContext, work: Callable[[BatchStore], _Result]) -> _Result:
    """Return the result of ``work`` on the store. Raises `StorageFailed`."""
    try:
        return await context.directory.run(work)
    except StoreFailed as error:
        context.metrics.batch_store_errors.inc()
        raise storage_failed(error) from None


def storage_failed(error: Exception) -> StorageFailed:
    """Return the answer to a client, which is not told the paths in ``error``."""
    _warnings.warning("--batch-dir: %s", error)
    reason = error.strerror if isinstance(error, OSError) else error
    return StorageFailed(f"The server cannot write to its disk: {reason}", retry_after_s=30)


def required(
    found: _Result | None, what: str, name: str | None, *, param: str | None = None
) -> _Result:
    """Return ``found``. Raises `NotFound` if there is none, or if it belongs to another key: its
    ``param`` is, by default, the one in the path."""
    if found is None:
        kind = FileNotFound if what == "file" else BatchNotFound
        raise kind(f"There is no {what} '{(name or '')[:64]}'.", param=param or f"{what}_id")
    return found


def page_query(request: Request, default: int, most: int) -> tuple[int, str | None, bool]:
    """Return the limit of a page, the id after which it starts, and whether the newest come first.
    Raises `InvalidValue`."""
    limit = page_limit(request, default, most)
    return limit, request.query_params.get("after"), newest_first(request)
