"""The table of endpoints: one `Operation` for each method of each path.

The application's routes and its OpenAPI document are both generated from it.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from router.api.endpoints import GenerationEndpoint
from router.errors import (
    BODY_ERRORS,
    MODEL_ERRORS,
    ApiError,
    ErrorResponse,
    Forbidden,
    GenerationTimeout,
    InternalError,
    Unauthorized,
)

Handler = Callable[[Request], Awaitable[Response]]
Access = Literal["open", "key", "metrics key", "admin key"]


@dataclass(frozen=True)
class Operation:
    """One method of one path. Each ``..._type`` is a type whose JSON schema msgspec can
    generate."""

    path: str
    """In Starlette's syntax, which may have converters: ``/v1/models/{model:path}``."""
    endpoint: Handler | ASGIApp
    summary: str
    tag: str
    """The section of the API description that lists it."""
    _: KW_ONLY
    method: Literal["GET", "POST", "DELETE"] = "GET"
    access: Access = "key"
    """The key required, if keys are set."""
    query: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Query parameters, as JSON schemas by name."""
    body_type: Any = None
    """The request body; None if there is none."""
    body_media_type: str = "application/json"
    example: Mapping[str, Any] | None = None
    """An example body."""
    response_type: Any = None
    """The response body; None if ``media_type`` is not JSON."""
    media_type: str = "application/json"
    statuses: tuple[int, ...] = (200,)
    """Status codes of responses with ``response_type``."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Response headers, with their descriptions."""
    event_type: Any = None
    """The data of a server-sent event; None if responses are never streamed."""
    stream_media_type: str = "text/event-stream"
    """With any other media type, events are lines of JSON."""
    stream_terminator: str | None = None
    """The data of the last event, if it is not an ``event_type``."""
    errors: tuple[type[ApiError], ...] = ()
    """Errors other than `InternalError`, `Unauthorized` and `Forbidden`."""
    error_type: Any = ErrorResponse

    @property
    def path_template(self) -> str:
        """The path in OpenAPI's syntax."""
        return re.sub(r":\w+}", "}", self.path)

    @property
    def all_errors(self) -> tuple[type[ApiError], ...]:
        closed = () if self.access == "open" else (Unauthorized, Forbidden)
        return (*closed, *self.errors, InternalError)


def generation_operation(
    path: str,
    endpoint: ASGIApp,
    summary: str,
    tag: str,
    endpoint_type: type[GenerationEndpoint[Any, Any]] | None = None,
    errors: tuple[type[ApiError], ...] = (),
) -> Operation:
    """Return an operation that generates, with or without streaming.

    ``endpoint`` is an ``endpoint_type`` or delegates to one. ``errors`` are those that others do
    not have.
    """
    if endpoint_type is None:
        assert isinstance(endpoint, GenerationEndpoint)
        endpoint_type = type(endpoint)
    return Operation(
        path,
        endpoint,
        summary,
        tag,
        method="POST",
        body_type=endpoint_type.body_type,
        example=endpoint_type.example,
        response_type=endpoint_type.response_type,
        event_type=endpoint_type.event_type,
        stream_media_type=endpoint_type.stream_media_type,
        stream_terminator=endpoint_type.stream_terminator,
        headers={
            "x-seed": "The seed of the generation, random if the request has none.",
            "x-debug-cache": "Sent if the request has this header too: JSON that compares the "
            "prompt with the closest earlier one.",
        },
        errors=(*BODY_ERRORS, *MODEL_ERRORS, GenerationTimeout, *errors),
        error_type=endpoint_type.error_type,
    )


def routes(operations: Iterable[Operation]) -> list[Route]:
    """Return one route per path, so that a 405 lists all methods of the path."""
    by_path: dict[str, _MethodRouter] = {}
    for operation in operations:
        route = Route(operation.path, operation.endpoint, methods=[operation.method])
        methods = by_path.setdefault(operation.path, _MethodRouter(operation.path_template))
        methods.apps |= dict.fromkeys(route.methods or (), route.app)
    return [Route(path, each, methods=list(each.apps)) for path, each in by_path.items()]


class _MethodRouter:
    """The applications at one path, by method. Puts ``path_template`` in the request's state."""

    def __init__(self, path_template: str) -> None:
        self.apps: dict[str, ASGIApp] = {}
        self._path_template = path_template

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"]["template"] = self._path_template
        await self.apps[scope["method"]](scope, receive, send)
