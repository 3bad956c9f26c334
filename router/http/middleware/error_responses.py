"""Errors as HTTP responses, each in the format of the API whose path was called."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

import router.anthropic.errors as anthropic
import router.decisions.errors as decisions
import router.ollama.errors as ollama
from router.errors import ApiError, InvalidRequest, MethodNotAllowed, NotFound


def error_response(error: ApiError, scope: Scope) -> Response:
    state = scope["state"]
    if anthropic.is_anthropic_path(state["path"]):
        body = anthropic.error_body(error, state["request_id"])
    elif ollama.is_ollama_path(state["path"]):
        body = ollama.error_body(error)
    elif decisions.is_decisions_path(state["path"]):
        body = decisions.error_body(error)
    else:
        body = error.body()
    return Response(body, error.status, headers=error.headers(), media_type="application/json")


async def http_exception_handler(request: Request, error: Exception) -> Response:
    """Convert Starlette's own errors (unknown path, wrong method) to our format."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return error_response(
            NotFound(f"The path {request.url.path} does not exist."), request.scope
        )
    if error.status_code == 405:
        allow = (error.headers or {}).get("Allow", "")
        message = f"{request.method} is not allowed for {request.url.path}."
        return error_response(MethodNotAllowed(message, allow), request.scope)
    return error_response(InvalidRequest(str(error.detail)), request.scope)
