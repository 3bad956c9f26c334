"""Errors in the forms of both clients: OpenAI's read ``error``, TypeSafe's also ``detail``."""

from __future__ import annotations

from msgspec import json

from router.decisions.schemas import DecisionErrorResponse, ErrorDetail
from router.errors import ApiError, ErrorInfo, InvalidRequest

PATHS = ("/v1/systemone", "/systemone", "/v1/decisions", "/decisions")


class InvalidDecision(InvalidRequest, status=422):
    """The state or a question in TypeSafe's form is not valid; `param` names the field."""

    def __init__(self, message: str, *path: str, code: str | None = None) -> None:
        super().__init__(message, param=".".join(path), code=code)
        self.path = path


def error_body(error: ApiError) -> bytes:
    detail: str | list[ErrorDetail] = error.message
    if isinstance(error, InvalidDecision):
        loc = ["body", *error.path]
        detail = [ErrorDetail(loc=loc, msg=error.message, type=error.code or "value_error")]
    info = ErrorInfo(message=error.message, type=error.type, param=error.param, code=error.code)
    return json.encode(DecisionErrorResponse(error=info, detail=detail))


def is_decisions_path(path: str) -> bool:
    """Return whether clients of ``path`` expect errors in this format."""
    return path in PATHS
