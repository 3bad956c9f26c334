"""`/admin`: administrative queries and commands. Only with ``--admin-key``."""

from __future__ import annotations

import logging
import time
from functools import partial
from typing import Annotated, Any

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from router.api.body import json_response
from router.api.operations import Operation
from router.api.pages import page_limit
from router.errors import EngineNotFound, InvalidRequest, InvalidValue, RequestNotFound
from router.fleet.administration import answer_id
from router.fleet.engines.engine import Engine
from router.fleet.router import Router
from router.fleet.sequences.remote_request import RemoteRequest
from router.http.middleware.key_file import KeyFileError

MAX_REQUESTS = 1000
_LEVELS = ("debug", "info", "warning", "error")
_TIERS = ("all", "ram")


class EngineDetails(Struct, frozen=True, kw_only=True):
    name: str
    model: str
    ready: bool
    trouble: Annotated[str | None, Meta(description="The reason why it accepts no requests.")]
    phase: str
    drained: Annotated[bool, Meta(description="Whether it has been drained.")]
    key: Annotated[str | None, Meta(description="The public key with which it joined.")]
    silence_s: Annotated[float, Meta(description="Seconds since its last heartbeat.")]
    sequences: int
    max_sequences: int
    used_blocks: int
    total_blocks: int
    active_memory_bytes: int
    generated_tokens: int
    version: str
    incarnation: Annotated[str, Meta(description="Different after each start.")]


class EngineList(Struct, frozen=True, kw_only=True):
    engines: list[EngineDetails]
    restarting: Annotated[
        list[str], Meta(description="Engines that are restarting or waiting for it.")
    ]


class RequestDetails(Struct, frozen=True, kw_only=True):
    """One sequence: a choice of an answer."""

    id: Annotated[str, Meta(description="The id of the answer; it can be used to end the request.")]
    choice: int
    key: Annotated[str, Meta(description="The name of the API key.")]
    model: str
    engine: str | None
    state: str
    age_s: float
    prompt_tokens: int
    computed_prompt_tokens: Annotated[
        int | None,
        Meta(description="Tokens computed or found in a cache so far; null: unknown, or queued."),
    ]
    output_tokens: int
    attempt: int


class RequestList(Struct, frozen=True, kw_only=True):
    total: int
    requests: Annotated[list[RequestDetails], Meta(description="Oldest first.")]


class Done(Struct, frozen=True, kw_only=True):
    """The action that was taken, and the number or names of its objects."""

    done: str
    count: int
    names: list[str] = []


async def list_engines(http: Request) -> Response:
    router = _router(http)
    engines = [_details(engine) for engine in router.registry.engines]
    return json_response(EngineList(engines=engines, restarting=router.administration.restarting))


async def drain_engine(http: Request) -> Response:
    undo = _flag(http, "undo")
    engine = _router(http).administration.drain(http.path_params["name"], undo=undo)
    return _done(http, "drain undone" if undo else "drained", [engine.name])


async def restart_engine(http: Request) -> Response:
    name = http.path_params["name"]
    _router(http).administration.restart(name)
    return _done(http, "restarting", [name])


async def restart_all(http: Request) -> Response:
    return _done(http, "restarting", _router(http).administration.restart())


async def drain_server(http: Request) -> Response:
    router = _router(http)
    router.draining = True
    return _done(http, "draining", count=router.admission.num_requests)


async def clear_cache(http: Request) -> Response:
    tier = _choice(http, "tier", _TIERS)
    names = _router(http).administration.clear_caches(ssd=tier == "all")
    return _done(http, f"cleared ({tier})", names)


async def reload_keys(http: Request) -> Response:
    try:
        count = await http.app.state.keys.reload()
    except KeyFileError as error:
        raise InvalidRequest(f"The API keys stay as they were: {error}", code="bad_keys") from None
    return _done(http, "keys reloaded", count=count)


async def set_log_level(http: Request) -> Response:
    level = _choice(http, "level", _LEVELS)
    logging.getLogger().setLevel(level.upper())
    return _done(http, f"level {level}", count=1)


async def list_requests(http: Request) -> Response:
    router = _router(http)
    found = router.administration.requests(page_limit(http, 100, MAX_REQUESTS))
    return json_response(
        RequestList(
            total=router.dispatcher.num_in_flight, requests=[_request(each) for each in found]
        )
    )


async def cancel_request(http: Request) -> Response:
    name = http.path_params["id"]
    return _done(http, "cancelled", count=_router(http).administration.cancel(name))


def _router(http: Request) -> Router:
    router: Router = http.app.state.router
    return router


def _done(http: Request, what: str, names: list[str] | None = None, count: int = 0) -> Response:
    """Return a response, and put it into the access log, which is the audit log."""
    names = names or []
    http.scope["state"]["audit"] = {"done": what.replace(" ", "_"), "count": count or len(names)}
    return json_response(Done(done=what, count=count or len(names), names=names))


def _flag(http: Request, name: str) -> bool:
    return _choice(http, name, ("false", "true")) == "true"


def _choice(http: Request, name: str, choices: tuple[str, ...]) -> str:
    """Return a parameter of the query; by default the first of ``choices``."""
    value = http.query_params.get(name, choices[0])
    if value not in choices:
        raise InvalidValue(f"'{name}' must be one of {', '.join(choices)}.", param=name)
    return value


def _details(engine: Engine) -> EngineDetails:
    stats = engine.stats
    return EngineDetails(
        name=engine.name,
        model=engine.hello.model,
        ready=engine.trouble is None,
        trouble=engine.trouble,
        phase=engine.phase,
        drained=engine.drained,
        key=engine.key,
        silence_s=round(engine.silence_s, 2),
        sequences=len(engine.request_ids),
        max_sequences=engine.hello.max_sequences,
        used_blocks=stats.used_blocks,
        total_blocks=stats.total_blocks,
        active_memory_bytes=stats.active_memory_bytes,
        generated_tokens=stats.generated_tokens_total,
        version=engine.hello.version,
        incarnation=engine.hello.incarnation,
    )


def _request(request: RemoteRequest) -> RequestDetails:
    return RequestDetails(
        id=answer_id(request),
        choice=int(request.request_id.rpartition(":")[2] or 0),
        key=request.tenant.name,
        model=request.model.id,
        engine=None if request.engine is None else request.engine.name,
        state=request.state.value,
        age_s=round(time.monotonic() - request.arrived_at, 3),
        prompt_tokens=request.num_prompt_tokens,
        computed_prompt_tokens=request.computed_prompt_tokens,
        output_tokens=request.num_output_tokens,
        attempt=request.attempt,
    )


def _one_of(choices: tuple[str, ...]) -> dict[str, Any]:
    return {"type": "string", "enum": list(choices), "default": choices[0]}


_get = partial(Operation, tag="Administration", access="admin key")
_post = partial(_get, method="POST", response_type=Done)
_UNDO = {"undo": _one_of(("false", "true"))}
OPERATIONS = (
    _get("/admin/engines", list_engines, "List the engines", response_type=EngineList),
    _post(
        "/admin/engines/{name}/drain",
        drain_engine,
        "Stop sending requests to an engine",
        query=_UNDO,
        errors=(InvalidRequest, EngineNotFound),
    ),
    _post(
        "/admin/engines/{name}/restart",
        restart_engine,
        "Restart an engine once its requests have finished",
        errors=(EngineNotFound,),
    ),
    _post("/admin/restart", restart_all, "Restart all engines, one at a time"),
    _post("/admin/drain", drain_server, "Stop accepting requests, permanently"),
    _post(
        "/admin/cache/clear",
        clear_cache,
        "Drop cached prefixes",
        query={"tier": _one_of(_TIERS)},
        errors=(InvalidRequest,),
    ),
    _post("/admin/keys/reload", reload_keys, "Reload the API keys", errors=(InvalidRequest,)),
    _post(
        "/admin/log-level",
        set_log_level,
        "Set the minimum log level of the router",
        query={"level": _one_of(_LEVELS)},
        errors=(InvalidRequest,),
    ),
    _get(
        "/admin/requests",
        list_requests,
        "List running and queued requests",
        query={"limit": {"type": "integer", "minimum": 1, "maximum": MAX_REQUESTS, "default": 100}},
        response_type=RequestList,
        errors=(InvalidRequest,),
    ),
    _post(
        "/admin/requests/{id}/cancel", cancel_request, "End a request", errors=(RequestNotFound,)
    ),
)
