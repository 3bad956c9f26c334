"""The state of the server, for people, probes, load balancers and Prometheus."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from router.api.body import json_response
from router.api.operations import Operation
from router.fleet.engines import Engine, ModelReplicas
from router.fleet.router import Router

_DEGRADED_FROM = 0.72
"""The fraction of the memory pressure threshold from which on the status is "degraded"."""

HealthStatus = Literal["ok", "degraded", "overloaded", "shutting_down"]


class Liveness(Struct, frozen=True):
    status: Literal["ok"] = "ok"


class Readiness(Struct, frozen=True):
    status: Literal["ready", "not ready"]
    reasons: Annotated[list[str], Meta(description="Why the server is not ready.")]


class BlockCounts(Struct, frozen=True, kw_only=True):
    total: int
    used: int
    free: int


class EngineHealth(Struct, frozen=True, kw_only=True):
    name: str
    ready: bool
    trouble: str | None
    phase: str
    stalled_s: float
    sequences: int
    max_sequences: int
    memory_pressure: Annotated[
        float, Meta(description="The fraction of the KV memory that cannot be evicted.")
    ]
    blocks: BlockCounts
    kept_states: int
    version: str


class ModelHealth(Struct, frozen=True, kw_only=True):
    id: str
    status: HealthStatus
    queued: int
    engines: list[EngineHealth]


class Version(Struct, frozen=True):
    version: str


class Health(Struct, frozen=True, kw_only=True):
    status: HealthStatus
    version: str
    reasons: list[str]
    requests: Annotated[int, Meta(description="Requests that run or wait.")]
    models: list[ModelHealth]


async def show_health(http: Request) -> Response:
    status, body = _health(http.app.state.router)
    return json_response(body, status)


async def show_livez(http: Request) -> Response:
    return json_response(Liveness())


async def show_readyz(http: Request) -> Response:
    reasons = _unready_reasons(http.app.state.router)
    if reasons:
        return json_response(Readiness("not ready", reasons), 503)
    return json_response(Readiness("ready", []))


async def show_metrics(http: Request) -> Response:
    return PlainTextResponse(
        http.app.state.router.metrics.exposition(),
        media_type="text/plain; version=0.0.4; charset=utf-8",
    )


async def show_version(http: Request) -> Response:
    return json_response(Version(http.app.state.router.version))


def _unready_reasons(router: Router) -> list[str]:
    """Return why the server is not ready; empty if every model has a ready engine."""
    if router.draining:
        return ["the server is shutting down"]
    models = list(router.registry.models.values())
    if not models:
        return ["no engine has joined yet", *router.registry.unregistered_engines]
    return [
        f"model {model.id}: {trouble}"
        for model in models
        if not model.ready_engines
        for trouble in (*model.troubles, *router.registry.unregistered_engines)
    ]


def _health(router: Router) -> tuple[int, Health]:
    """Return the HTTP status and the body.

    The server's status is that of its worst model. A model without a ready engine makes the server
    degraded, with a 503.
    """
    models = list(router.registry.models.values())
    threshold = router.settings.memory_pressure_threshold
    reasons = _unready_reasons(router)
    states = [_state(model, threshold) for model in models]
    state: HealthStatus = "ok"
    if router.draining:
        state = "shutting_down"
    elif "overloaded" in states and not reasons:
        state = "overloaded"
    elif reasons or "degraded" in states:
        state = "degraded"
    status = 503 if reasons or state in ("overloaded", "shutting_down") else 200
    return status, Health(
        status=state,
        version=router.version,
        reasons=reasons or [trouble for model in models for trouble in model.troubles],
        requests=router.admission.num_requests,
        models=[
            ModelHealth(
                id=model.names[0],
                status=model_state,
                queued=router.dispatcher.num_waiting(model.id),
                engines=[_engine(engine) for engine in model.engines],
            )
            for model, model_state in zip(models, states, strict=True)
        ],
    )


def _state(model: ModelReplicas, threshold: float) -> HealthStatus:
    ready = model.ready_engines
    if not ready:
        return "degraded"
    pressure = min(engine.memory_pressure for engine in ready)
    if pressure >= threshold:
        return "overloaded"
    return "degraded" if pressure >= _DEGRADED_FROM * threshold else "ok"


def _engine(engine: Engine) -> EngineHealth:
    stats = engine.stats
    blocks = BlockCounts(total=stats.total_blocks, used=stats.used_blocks, free=stats.free_blocks)
    return EngineHealth(
        name=engine.name,
        ready=engine.trouble is None,
        trouble=engine.trouble,
        phase=engine.phase,
        stalled_s=round(engine.stalled_s, 1),
        sequences=len(engine.request_ids),
        max_sequences=engine.hello.max_sequences,
        memory_pressure=round(engine.memory_pressure, 4),
        blocks=blocks,
        kept_states=stats.kept_states,
        version=engine.hello.version,
    )


_operation = partial(Operation, tag="Server", access="open")
OPERATIONS = (
    _operation(
        "/health",
        show_health,
        "The state of the server, of each model and each engine",
        response_type=Health,
        statuses=(200, 503),
    ),
    _operation("/livez", show_livez, "Whether the process runs", response_type=Liveness),
    _operation(
        "/readyz",
        show_readyz,
        "Whether every model can answer",
        response_type=Readiness,
        statuses=(200, 503),
    ),
    _operation(
        "/metrics",
        show_metrics,
        "Metrics for Prometheus",
        access="metrics key",
        media_type="text/plain",
    ),
    _operation("/version", show_version, "The server's version", response_type=Version),
)
