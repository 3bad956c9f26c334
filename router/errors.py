"""The errors that end a request, and their OpenAI format."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta


class ErrorInfo(msgspec.Struct, frozen=True, kw_only=True):
    message: str
    type: str
    param: Annotated[
        str | None, Meta(description="The invalid field, if any: `messages[0].content`.")
    ]
    code: str | None


class ErrorResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a request that failed."""

    error: ErrorInfo


class ApiError(Exception):
    """An error that is reported to the client.

    Raised where it is found, and turned into a response (or the last event of a stream) in one
    place. The docstring of a subclass describes its status in `/openapi.json`. A subclass passes
    the attributes below as keywords and inherits the others.
    """

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    default_code: ClassVar[str | None] = None
    default_retry_after_s: ClassVar[float | None] = None

    def __init_subclass__(cls, status: int = 0, type: str = "", code: str = "") -> None:
        cls.status = status or cls.status
        cls.type = type or cls.type
        cls.default_code = code or cls.default_code

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        """``retry_after_s`` becomes the `Retry-After` header, rounded up to whole seconds."""
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or self.default_code
        if retry_after_s is None:
            retry_after_s = self.default_retry_after_s
        self.retry_after_s = retry_after_s

    def rename_fields(self, names: Mapping[str, str]) -> None:
        """Rename the field in `param` and `message`; ``names`` maps our names to another API's."""
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


class InvalidRequest(ApiError, status=400, type="invalid_request_error"):
    """The body or one of its fields is not valid; `param` names the field."""


class InvalidValue(InvalidRequest, code="invalid_value"): ...


class ContextLengthExceeded(InvalidRequest, code="context_length_exceeded"): ...


class NotSupported(InvalidRequest, code="unsupported_parameter"): ...


class ContentNotSupported(InvalidRequest, code="unsupported_content"): ...


class Unauthorized(ApiError, status=401, type="authentication_error", code="invalid_api_key"):
    """The API key is missing or unknown."""

    def headers(self) -> dict[str, str]:
        return {"www-authenticate": "Bearer"}


class Forbidden(ApiError, status=403, type="permission_error"):
    """The API key may not use the model or manage models, or is not the admin key; or a server
    without keys was called by an unknown host name."""


class ModelForbidden(Forbidden, code="model_not_allowed"): ...


class AdminForbidden(Forbidden, code="admin_key_needed"): ...


class ManagementForbidden(Forbidden, code="management_not_allowed"): ...


class HostForbidden(Forbidden, code="host_not_allowed"): ...


class SiteForbidden(Forbidden, code="site_not_allowed"): ...


class NotFound(ApiError, status=404, type="invalid_request_error", code="not_found"):
    """The path is unknown."""


class ModelNotFound(NotFound, code="model_not_found"):
    """The model is unknown."""


class EngineNotFound(NotFound, code="engine_not_found"):
    """The engine is unknown."""


class RequestNotFound(NotFound, code="request_not_found"):
    """No such request is running or queued."""


class MethodNotAllowed(
    ApiError, status=405, type="invalid_request_error", code="method_not_allowed"
):
    def __init__(self, message: str, allow: str) -> None:
        super().__init__(message)
        self.allow = allow

    def headers(self) -> dict[str, str]:
        return {"allow": self.allow}


class BodyTimeout(ApiError, status=408, type="invalid_request_error", code="request_timeout"):
    """The body did not arrive in time."""


class HeadersTimeout(BodyTimeout):
    """The headers did not arrive in time."""


class HeadersTooLarge(ApiError, status=431, type="invalid_request_error", code="headers_too_large"):
    """The headers are larger than those of any real client."""


class BodyTooLarge(ApiError, status=413, type="invalid_request_error", code="request_too_large"):
    """The body is larger than `--max-request-bytes`."""


class UnsupportedMediaType(
    ApiError, status=415, type="invalid_request_error", code="unsupported_media_type"
):
    """The body has another media type or an unknown compression."""

    def headers(self) -> dict[str, str]:
        return {"accept-encoding": "gzip, deflate, zstd"}


class Http2NotSupported(
    ApiError, status=505, type="invalid_request_error", code="http_version_not_supported"
):
    """The client began with HTTP/2, without asking."""

    def __init__(self) -> None:
        super().__init__("This server speaks HTTP/1.1: do not use HTTP/2 with prior knowledge.")


class TooManyRequests(ApiError, status=429, type="rate_limit_error", code="rate_limit_exceeded"):
    """Rate limit exceeded, or the queue is full."""


class Unavailable(ApiError, status=503, code="service_unavailable"):
    """No engine can accept the request now; a retry may succeed."""

    default_retry_after_s = 2.0


class RequestCancelled(Unavailable, code="cancelled"):
    """An administrator cancelled the request."""


class ModelJobFailed(ApiError, status=500, code="model_job_failed"):
    """The server failed, or a model could not be pulled or deleted."""


class EngineLost(Unavailable, code="engine_lost"):
    """The engine was lost, and the request was not retried on another one."""


class GenerationTimeout(ApiError, status=504, code="timeout"):
    """The first or the next token did not arrive in time."""


class EndpointNotSupported(ApiError, status=501, type="invalid_request_error", code="not_served"):
    """The path exists in other servers' APIs but not in this one."""

    def headers(self) -> dict[str, str]:
        return {"x-should-retry": "false"}  # OpenAI's clients otherwise retry any 5xx


class InfillNotSupported(EndpointNotSupported, code="infill_not_supported"):
    """The model has no tokens for fill-in-the-middle."""


class InternalError(ApiError, code="internal_error"):
    """The server failed."""

    def __init__(self) -> None:
        super().__init__("The server failed to process the request.")


class ClientDisconnected(Exception):
    """The client closed the connection, so there is no answer."""


BODY_ERRORS = (InvalidRequest, BodyTimeout, BodyTooLarge, UnsupportedMediaType)
"""Errors raised while a body is read and checked."""
MODEL_ERRORS = (ModelForbidden, ModelNotFound, TooManyRequests, Unavailable)
"""Errors raised when a model is needed."""
