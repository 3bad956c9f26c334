"""The table of what is served: one `Operation` for each method of each path.

The routes of the application and its OpenAPI document are both made from it.
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
    """One method of one path. Each ``..._type`` is a type that msgspec can describe as JSON."""

    path: str
    """In Starlette's syntax, which may have converters: ``/v1/models/{model:path}``."""
    endpoint: Handler | ASGIApp
    summary: str
    tag: str
    """The heading under which the description shows it."""
    _: KW_ONLY
    method: Literal["GET", "POST", "DELETE"] = "GET"
    access: Access = "key"
    """The key that is needed, where keys are set."""
    query: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Parameters of the query, as JSON schemas by name."""
    body_type: Any = None
    """The request's body; None if there is none."""
    body_media_type: str = "application/json"
    example: Mapping[str, Any] | None = None
    """A body."""
    response_type: Any = None
    """The answer's body; None if ``media_type`` is not JSON."""
    media_type: str = "application/json"
    statuses: tuple[int, ...] = (200,)
    """Statuses that come with ``response_type``."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Headers of the answer, with their descriptions."""
    event_type: Any = None
    """The data of a server-sent event; None if the answer is never a stream."""
    stream_media_type: str = "text/event-stream"
    """Events are lines of JSON if it is another."""
    stream_terminator: str | None = None
    """The data of the last event, if that is not an ``event_type``."""
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
) -> Operation:
    """Return an operation that generates, streaming or not.

    ``endpoint`` is an ``endpoint_type`` or delegates to one.
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
            "x-seed": "The seed of the generation, drawn at random if none was given.",
            "x-debug-cache": "If the request has this header too: JSON that compares its prompt to"
            " the closest earlier one.",
        },
        errors=(*BODY_ERRORS, *MODEL_ERRORS, GenerationTimeout),
        error_type=endpoint_type.error_type,
    )


def routes(operations: Iterable[Operation]) -> list[Route]:
    """Return one route per path, so that a 405 names all methods of the path."""
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
