"""What the server answers, as data: one `Operation` for each method of each path.

The routes of the application and its OpenAPI document are both made of the same table.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from router.api.endpoints import GenerationEndpoint
from router.errors import (
    ApiError,
    BodyTimeout,
    BodyTooLarge,
    ErrorResponse,
    GenerationTimeout,
    InternalError,
    InvalidRequest,
    ModelNotFound,
    TooManyRequests,
    Unauthorized,
    Unavailable,
    UnsupportedMediaType,
)

Handler = Callable[[Request], Awaitable[Response]]
Access = Literal["open", "key", "metrics key"]

BODY_ERRORS = (InvalidRequest, BodyTimeout, BodyTooLarge, UnsupportedMediaType)
MODEL_ERRORS = (ModelNotFound, TooManyRequests, Unavailable)


@dataclass(frozen=True, kw_only=True)
class Operation:
    """``path`` is Starlette's; ``errors`` are those beside `InternalError` and `Unauthorized`.

    ``body_type``, ``response_type``, ``event_type`` and ``error_type`` are types that msgspec
    knows: of the request's JSON, of the answer's, and of the data of server-sent events where the
    answer can be a stream, which ``stream_terminator`` ends. ``response_type`` is None for one of
    another ``media_type``.
    """

    path: str
    endpoint: Handler | ASGIApp
    summary: str
    tag: str
    method: Literal["GET", "POST", "DELETE"] = "GET"
    access: Access = "key"
    query: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The JSON schemas of what may be in the query, by name."""
    body_type: Any = None
    example: Mapping[str, Any] | None = None
    response_type: Any = None
    media_type: str = "application/json"
    statuses: tuple[int, ...] = (200,)
    headers: Mapping[str, str] = field(default_factory=dict)
    """Those of the answer, with what they say."""
    event_type: Any = None
    stream_terminator: str | None = None
    errors: tuple[type[ApiError], ...] = ()
    error_type: Any = ErrorResponse

    @property
    def path_template(self) -> str:
        """The path as OpenAPI writes it."""
        return re.sub(r":\w+}", "}", self.path)

    @property
    def all_errors(self) -> tuple[type[ApiError], ...]:
        closed = () if self.access == "open" else (Unauthorized,)
        return (*closed, *self.errors, InternalError)


def generation_operation(
    path: str,
    endpoint: ASGIApp,
    summary: str,
    tag: str,
    endpoint_type: type[GenerationEndpoint[Any, Any]] | None = None,
) -> Operation:
    """An operation that generates, streaming or not. ``endpoint`` is an ``endpoint_type``, or has
    one do the work."""
    if endpoint_type is None:
        assert isinstance(endpoint, GenerationEndpoint)
        endpoint_type = type(endpoint)
    return Operation(
        path=path,
        endpoint=endpoint,
        summary=summary,
        tag=tag,
        method="POST",
        body_type=endpoint_type.body_type,
        example=endpoint_type.example,
        response_type=endpoint_type.response_type,
        event_type=endpoint_type.event_type,
        stream_terminator=endpoint_type.stream_terminator,
        headers={
            "x-seed": "The seed of the generation, drawn where none was given.",
            "x-debug-cache": "Where a request asks by the same header: JSON that compares its"
            " prompt to the closest earlier one.",
        },
        errors=(*BODY_ERRORS, *MODEL_ERRORS, GenerationTimeout),
        error_type=endpoint_type.error_type,
    )


def routes(operations: Iterable[Operation]) -> list[Route]:
    """One for each path, so that a wrong method is told of all the right ones."""
    by_path: dict[str, _MethodRouter] = {}
    for operation in operations:
        route = Route(operation.path, operation.endpoint, methods=[operation.method])
        methods = by_path.setdefault(operation.path, _MethodRouter(operation.path_template))
        methods.apps |= dict.fromkeys(route.methods or (), route.app)
    return [Route(path, each, methods=list(each.apps)) for path, each in by_path.items()]


class _MethodRouter:
    """What is at one path; it leaves the path's ``path_template`` in the request's state."""

    def __init__(self, path_template: str) -> None:
        self.apps: dict[str, ASGIApp] = {}
        self._path_template = path_template

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"]["template"] = self._path_template
        await self.apps[scope["method"]](scope, receive, send)
