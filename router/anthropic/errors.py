"""Errors in Anthropic's format."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct, json

from router.errors import ApiError, ContextLengthExceeded

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class AnthropicError(Struct, frozen=True):
    type: str
    message: str


class AnthropicErrorResponse(Struct, frozen=True, kw_only=True):
    error: AnthropicError
    request_id: str | None = None
    type: Literal["error"] = "error"


def error_body(error: ApiError, request_id: str | None = None) -> bytes:
    default_type = "api_error" if error.status >= 500 else "invalid_request_error"
    message = error.message
    if isinstance(error, ContextLengthExceeded):
        # Coding agents look for these words, and then shorten their conversation.
        message = f"prompt is too long: {message}"
    detail = AnthropicError(_TYPES.get(error.status, default_type), message)
    return json.encode(AnthropicErrorResponse(error=detail, request_id=request_id))


def is_anthropic_path(path: str) -> bool:
    """Return whether clients of ``path`` expect errors in this format."""
    return path == "/v1/messages" or path.startswith("/v1/messages/")
