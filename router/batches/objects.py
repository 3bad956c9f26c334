"""Files and batches in the API's format, and the body that creates a batch."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from msgspec import Meta, Struct

from router.batches.store import BatchState
from router.errors import InvalidValue
from router.schemas.body import RequestBody

BatchEndpoint = Literal[
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"
]
MIN_EXPIRY_S, MAX_EXPIRY_S = 3600, 2_592_000
MAX_WINDOW_S = 30 * 86400
_MAX_PAIRS = 16
_WINDOW = re.compile(r"([1-9][0-9]{0,6})([smhd])")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


class FileObject(Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"
    status_details: None = None


class FileList(Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


class BatchError(Struct, frozen=True, kw_only=True):
    """The reasons why the file of a batch is invalid."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchErrors(Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[BatchError]


class RequestCounts(Struct, frozen=True, kw_only=True):
    total: int = 0
    completed: int = 0
    failed: int = 0


class CachedTokens(Struct, frozen=True, kw_only=True):
    cached_tokens: int = 0


class ReasoningTokens(Struct, frozen=True, kw_only=True):
    reasoning_tokens: int = 0


class BatchUsage(Struct, frozen=True, kw_only=True):
    """Token counts of all answered lines."""

    input_tokens: int = 0
    input_tokens_details: CachedTokens = CachedTokens()
    output_tokens: int = 0
    output_tokens_details: ReasoningTokens = ReasoningTokens()
    total_tokens: int = 0


class BatchObject(Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    model: Annotated[str | None, Meta(description="The model of its first line.")]
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: BatchState
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    usage: BatchUsage
    metadata: dict[str, str] | None


class BatchList(Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileExpiry(Struct, frozen=True, kw_only=True):
    anchor: Literal["created_at"]
    seconds: Annotated[int, Meta(ge=MIN_EXPIRY_S, le=MAX_EXPIRY_S)]


class CreateBatch(RequestBody, frozen=True, kw_only=True):
    input_file_id: Annotated[str, Meta(max_length=64)]
    endpoint: BatchEndpoint
    completion_window: Annotated[
        str,
        Meta(
            max_length=16,
            description="`24h`, or another time up to `30d`: a number with s, m, h or d.",
        ),
    ]
    metadata: (
        dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]] | None
    ) = None
    output_expires_after: FileExpiry | None = None

    def check(self) -> None:
        if len(self.metadata or ()) > _MAX_PAIRS:
            raise InvalidValue(f"'metadata' has more than {_MAX_PAIRS} pairs.", param="metadata")
        if not 0 < self.window_s <= MAX_WINDOW_S:
            raise InvalidValue(
                "'completion_window' must be a time up to 30d, such as 24h.",
                param="completion_window",
            )

    @property
    def window_s(self) -> int:
        """The seconds of the window; 0 if it is invalid."""
        found = _WINDOW.fullmatch(self.completion_window)
        return int(found[1]) * _UNITS[found[2]] if found else 0
