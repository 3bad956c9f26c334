"""What goes wrong with a request, and how the client is told: OpenAI's error shape."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import ClassVar

import msgspec


class ErrorInfo(msgspec.Struct, frozen=True, kw_only=True):
    """``param`` is the field that is to blame, where it is one: ``messages[0].content``."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(msgspec.Struct, frozen=True, kw_only=True):
    """What is answered in place of what was asked for."""

    error: ErrorInfo


class ApiError(Exception):
    """An answer other than the one that was asked for. Raised where it is found,
    turned into a response (or into the last event of a stream) in one place.

    ``retry_after_s`` becomes the `Retry-After` header, rounded up to whole seconds.
    """

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    default_code: ClassVar[str | None] = None

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or self.default_code
        self.retry_after_s = retry_after_s

    def rename_fields(self, names: Mapping[str, str]) -> None:
        """Speaks of the fields as another API calls them; ``names`` has theirs by ours."""
        for ours, theirs in names.items():
            if self.param is not None and re.match(rf"{re.escape(ours)}(?![\w])", self.param):
                self.param = theirs + self.param[len(ours) :]
                self.message = self.message.replace(f"'{ours}", f"'{theirs}")
                return

    def body(self) -> bytes:
        detail = ErrorInfo(message=self.message, type=self.type, param=self.param, code=self.code)
        return msgspec.json.encode(ErrorResponse(error=detail))

    def headers(self) -> dict[str, str]:
        if self.retry_after_s is None:
            return {}
        return {"retry-after": str(max(1, math.ceil(self.retry_after_s)))}


class InvalidRequest(ApiError):
    """The body or a field of it is not valid; `param` names it."""

    status = 400
    type = "invalid_request_error"


class ContextLengthExceeded(InvalidRequest):
    default_code = "context_length_exceeded"


class NotSupported(InvalidRequest):
    default_code = "unsupported_parameter"


class Unauthorized(ApiError):
    """No API key, or none that is known."""

    status = 401
    type = "authentication_error"
    default_code = "invalid_api_key"

    def headers(self) -> dict[str, str]:
        return {"www-authenticate": "Bearer"}


class NotFound(ApiError):
    """No such path."""

    status = 404
    type = "invalid_request_error"
    default_code = "not_found"


class ModelNotFound(NotFound):
    """No such model."""

    default_code = "model_not_found"


class MethodNotAllowed(ApiError):
    status = 405
    type = "invalid_request_error"
    default_code = "method_not_allowed"

    def __init__(self, message: str, allow: str) -> None:
        super().__init__(message)
        self.allow = allow

    def headers(self) -> dict[str, str]:
        return {"allow": self.allow}


class BodyTimeout(ApiError):
    """The body did not arrive in time."""

    status = 408
    type = "invalid_request_error"
    default_code = "request_timeout"


class HeadersTimeout(BodyTimeout):
    """The headers did not arrive in time."""


class HeadersTooLarge(ApiError):
    """The headers are longer than any client's."""

    status = 431
    type = "invalid_request_error"
    default_code = "headers_too_large"


class BodyTooLarge(ApiError):
    """The body is over `--max-request-bytes`."""

    status = 413
    type = "invalid_request_error"
    default_code = "request_too_large"


class UnsupportedMediaType(ApiError):
    """The body is of another media type, or compressed in an unknown way."""

    status = 415
    type = "invalid_request_error"
    default_code = "unsupported_media_type"


class TooManyRequests(ApiError):
    """Too many requests, or a full queue."""

    status = 429
    type = "rate_limit_error"
    default_code = "rate_limit_exceeded"


class Unavailable(ApiError):
    """No engine can take the request now; a later try may work."""

    status = 503
    type = "server_error"
    default_code = "service_unavailable"


class EngineLost(Unavailable):
    """The engine went away with the request, and it was not (or not again) tried elsewhere."""

    default_code = "engine_lost"


class GenerationTimeout(ApiError):
    """The first token, or the next one, did not come in time."""

    status = 504
    type = "server_error"
    default_code = "timeout"


class EndpointNotSupported(ApiError):
    """The path is known from elsewhere, and nothing here answers it."""

    status = 501
    type = "invalid_request_error"
    default_code = "not_served"

    def headers(self) -> dict[str, str]:
        return {"x-should-retry": "false"}  # OpenAI's clients try a 5xx again otherwise


class InternalError(ApiError):
    """An error of the server itself."""

    default_code = "internal_error"

    def __init__(self) -> None:
        super().__init__("The server had an error while processing the request.")


class ClientDisconnected(Exception):
    """The client closed the connection: nobody is left to answer."""
