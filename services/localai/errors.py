"""Errors reported to the caller of a method."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import grpc


class CallFailed(Exception):
    """The call ends with ``code``; the message is the reason."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class InvalidCall(CallFailed):
    """A field of the call is not supported; the message names it."""

    def __init__(self, message: str) -> None:
        super().__init__(grpc.StatusCode.INVALID_ARGUMENT, message)


_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    413: grpc.StatusCode.INVALID_ARGUMENT,
    422: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
_UNAVAILABLE = (
    "service_unavailable",
    "no_engine_ready",
    "engine_lost",
    "shutting_down",
    "cancelled",
)
"""Codes of the router for errors that another attempt may not have."""


def of_answer(status: int, message: str) -> CallFailed:
    """Return the error for an HTTP response with ``status``."""
    return CallFailed(_CODES.get(status, grpc.StatusCode.INTERNAL), message)


def of_event(error: Mapping[str, Any]) -> CallFailed:
    """Return the error for the end of a stream, which has no HTTP status."""
    status = {"invalid_request_error": 400, "rate_limit_error": 429}.get(error["type"], 500)
    if (code := error["code"]) == "timeout":
        status = 504
    elif code in _UNAVAILABLE:
        status = 503
    return of_answer(status, error["message"])
