"""`/api/pull` and `/api/delete`: add and remove models at run time."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from router.api.body import json_response, read_body
from router.api.endpoints import cancel_on_disconnect
from router.api.operations import Operation
from router.api.sse import on_one_line
from router.errors import (
    BODY_ERRORS,
    ApiError,
    ClientDisconnected,
    InternalError,
    InvalidRequest,
    ManagementForbidden,
    ModelJobFailed,
    ModelNotFound,
    Unavailable,
)
from router.fleet.models.supervised import RemoteJob
from router.fleet.router import Router
from router.fleet.tenants.tenant import ADMINISTRATOR
from router.ollama.errors import OllamaError, error_body
from router.ollama.names import listed_names, served_name
from router.ollama.objects import OllamaProgress
from router.ollama.schemas import OllamaModelRequest, OllamaPullRequest
from router.ollama.writer import MEDIA_TYPE

logger = logging.getLogger(__name__)


def operations(router: Router) -> list[Operation]:
    settings = router.settings
    needs_admin = settings.admin_key is not None and not settings.ollama_manage
    managing = partial(
        Operation,
        tag="Ollama",
        access="admin key" if needs_admin else "key",
        error_type=OllamaError,
    )
    return [
        managing(
            "/api/pull",
            pull_model,
            "Download a model and serve it",
            method="POST",
            body_type=OllamaPullRequest,
            example={"model": "demo", "stream": False},
            response_type=OllamaProgress,
            event_type=OllamaProgress,
            stream_media_type=MEDIA_TYPE,
            errors=(*BODY_ERRORS, Unavailable, ModelJobFailed),
        ),
        managing(
            "/api/delete",
            delete_model,
            "Delete a pulled model",
            method="DELETE",
            body_type=OllamaModelRequest,
            example={"model": "nobody"},
            media_type="text/plain",
            errors=(*BODY_ERRORS, ModelNotFound, Unavailable, ModelJobFailed),
        ),
    ]


async def pull_model(http: Request) -> Response:
    router: Router = http.app.state.router
    body, _ = await read_body(http, router, OllamaPullRequest)
    _check_allowed(http)
    name = served_name(router, body.wanted)
    states = router.supervised.follow_job("pull", name)
    try:
        async with cancel_on_disconnect(http.receive):
            _check_job(await anext(states))
    except BaseException:
        await states.aclose()
        raise
    if body.stream is not False:
        return StreamingResponse(_lines(name, states, http), media_type=MEDIA_TYPE)
    async with cancel_on_disconnect(http.receive), aclosing(states):
        async for job in states:
            _check_job(job)
    return json_response(OllamaProgress(status="success"))


async def delete_model(http: Request) -> Response:
    router: Router = http.app.state.router
    body, _ = await read_body(http, router, OllamaModelRequest)
    _check_allowed(http)
    name = served_name(router, body.wanted)
    if name not in _all_names(router):
        raise ModelNotFound(f"The model '{name}' is not served here.", param="model")
    async for job in router.supervised.follow_job("delete", name):
        _check_job(job)
    return Response()


def _check_job(job: RemoteJob) -> None:
    """Raise `InvalidRequest` if the supervisor refused ``job``, `ModelJobFailed` if it failed."""
    match job.state:
        case "refused":
            raise InvalidRequest(f"Cannot {job.kind} the model: {job.reason}.", param="model")
        case "failed":
            raise ModelJobFailed(f"{job.kind} model: {job.reason}")


def _check_allowed(http: Request) -> None:
    router: Router = http.app.state.router
    if not router.settings.ollama_manage and http.state.tenant is not ADMINISTRATOR:
        raise ManagementForbidden(
            "Pulling and deleting models requires --ollama-manage or the --admin-key."
        )


def _all_names(router: Router) -> set[str]:
    return {name for names in listed_names(router).values() for name in names}


async def _lines(
    name: str, states: AsyncGenerator[RemoteJob, None], http: Request
) -> AsyncIterator[bytes]:
    """Yield the progress of a download. An error is sent as the last line."""
    yield _line(OllamaProgress(status="pulling manifest"))
    try:
        async with cancel_on_disconnect(http.receive), aclosing(states):
            async for job in states:
                _check_job(job)
                if job.total:
                    yield _line(_progress(name, job))
    except ApiError as error:
        yield on_one_line(error_body(error)) + b"\n"
        return
    except ClientDisconnected:
        raise
    except Exception:
        logger.exception("error while streaming the progress of a pull")
        yield error_body(InternalError()) + b"\n"
        return
    yield _line(OllamaProgress(status="success"))


def _progress(name: str, job: RemoteJob) -> OllamaProgress:
    done = min(job.completed, job.total)
    return OllamaProgress(status=f"pulling {name}", digest=name, total=job.total, completed=done)


def _line(progress: OllamaProgress) -> bytes:
    return on_one_line(msgspec.json.encode(progress)) + b"\n"
