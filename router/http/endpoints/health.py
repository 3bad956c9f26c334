"""The state of the server, for operators, probes, load balancers and Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from typing import Annotated, Literal

from msgspec import Meta, Struct, structs
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from router.api.body import json_response
from router.api.operations import Operation
from router.errors import Forbidden
from router.fleet.engines.engine import Engine, ModelReplicas
from router.fleet.models.supervised import ConfiguredState
from router.fleet.router import Router
from shared.wire import EngineStats

_DEGRADED_FROM = 0.72
"""Fraction of the memory pressure threshold above which the status is "degraded"."""

HealthStatus = Literal["ok", "degraded", "overloaded", "shutting_down"]


class Liveness(Struct, frozen=True):
    status: Literal["ok"] = "ok"


class Readiness(Struct, frozen=True):
    status: Literal["ready", "not ready"]
    reasons: Annotated[list[str], Meta(description="The reason why the server is not ready.")]


class BlockCounts(Struct, frozen=True, kw_only=True):
    total: int
    used: int
    free: int

    @classmethod
    def of(cls, stats: EngineStats) -> BlockCounts:
        return cls(total=stats.total_blocks, used=stats.used_blocks, free=stats.free_blocks)


class EngineHealth(Struct, frozen=True, kw_only=True):
    name: str
    ready: bool
    trouble: str | None
    phase: str
    stalled_s: float
    sequences: int
    max_sequences: int
    memory_pressure: Annotated[
        float, Meta(description="Fraction of the KV memory that cannot be evicted.")
    ]
    blocks: BlockCounts
    kept_states: int
    attention: Annotated[
        str,
        Meta(description="On a GPU, whether attention reads KV by kernels or by gathering it."),
    ]
    version: str


class ModelState(Struct, frozen=True, kw_only=True):
    """A model without its engines."""

    id: str
    status: HealthStatus
    state: Annotated[
        ConfiguredState,
        Meta(description="An unloaded model is loaded on demand; a broken one failed to load."),
    ]
    reason: Annotated[
        str | None, Meta(description="The reason why the model is broken, or not loaded yet.")
    ]
    load_s: Annotated[float | None, Meta(description="Duration of its last load, in seconds.")]
    queued: int


class ModelHealth(ModelState, frozen=True, kw_only=True):
    engines: list[EngineHealth]


class Version(Struct, frozen=True):
    version: str


class BatchTotals(Struct, frozen=True, kw_only=True):
    """Totals of all keys; zeros without `--batch-dir`."""

    unfinished: int
    lines: Annotated[int, Meta(description="Lines of the unfinished batches.")]
    lines_done: Annotated[int, Meta(description="Lines with an answer or an error.")]
    running: Annotated[int, Meta(description="Lines that are running or queued at an engine.")]

    @classmethod
    def of(cls, router: Router) -> BatchTotals:
        return cls(**asdict(router.batches))


class Health(Struct, frozen=True, kw_only=True):
    status: HealthStatus
    version: str
    reasons: list[str]
    requests: Annotated[int, Meta(description="Running and queued requests.")]
    batches: BatchTotals
    models: list[ModelHealth]


async def show_health(http: Request) -> Response:
    status, body = health_of(http.app.state.router)
    return json_response(body, status)


async def show_livez(http: Request) -> Response:
    return json_response(Liveness())


async def show_readyz(http: Request) -> Response:
    router: Router = http.app.state.router
    reasons = _unready_reasons(router)
    if can_answer(router):
        return json_response(Readiness("ready", reasons))
    return json_response(Readiness("not ready", reasons), 503)


async def show_metrics(http: Request) -> Response:
    router: Router = http.app.state.router
    guarded = router.settings.metrics_key is not None or not http.app.state.keys
    return PlainTextResponse(
        router.metrics.exposition(with_keys=guarded or http.state.may_administer),
        media_type="text/plain; version=0.0.4; charset=utf-8",
    )


async def show_version(http: Request) -> Response:
    return json_response(Version(http.app.state.router.version))


def can_answer(router: Router) -> bool:
    """Return whether the server can answer requests for at least one model: it has a ready engine,
    or can be loaded on demand."""
    if router.draining or router.leaving:
        return False
    if any(model.ready_engines for model in router.registry.models.values()):
        return True
    return any(model.state == "unloaded" for model in router.supervised.models.values())


def _unready_reasons(router: Router) -> list[str]:
    """Return the reasons why models cannot answer now, except those loaded on demand."""
    if router.draining or router.leaving:
        return ["the server is shutting down"]
    found = []
    configured, registry = router.supervised.models, router.registry
    for model_id in {**registry.models, **configured}:
        model, known = registry.models.get(model_id), configured.get(model_id)
        if (model is not None and model.ready_engines) or (known and known.state == "unloaded"):
            continue
        troubles = [] if model is None else model.troubles
        if known is not None and known.state == "broken":
            troubles = [f"broken: {known.reason}"]
        if known is not None and known.state == "loading" and known.reason:
            troubles = [f"loading: {known.reason}"]
        troubles = troubles or ["loading"]
        found += [f"model {model_id}: {trouble}" for trouble in troubles]
    if not registry.models and not configured:
        found.append("no engine has joined yet")
    return [*found, *registry.unregistered_engines] if found else []


def health_of(router: Router) -> tuple[int, Health]:
    """Return the HTTP status, and the body. The status is 503 if no model can answer."""
    status, reasons = server_state(router)
    bad = not can_answer(router) or status in ("overloaded", "shutting_down")
    return 503 if bad else 200, Health(
        status=status,
        version=router.version,
        reasons=reasons,
        requests=router.admission.num_requests,
        batches=BatchTotals.of(router),
        models=[
            ModelHealth(
                **structs.asdict(model),
                engines=[engine_health(engine) for engine in router.registry.engines_of(model.id)],
            )
            for model in model_states(router)
        ],
    )


def server_state(router: Router) -> tuple[HealthStatus, list[str]]:
    """Return the status and its reasons, for the worst model. A model that cannot answer makes the
    server degraded."""
    reasons = _unready_reasons(router)
    models = list(router.registry.models.values())
    threshold = router.settings.memory_pressure_threshold
    states = [_status(model, threshold) for model in models if model.ready_engines]
    status: HealthStatus = "ok"
    if router.draining or router.leaving:
        status = "shutting_down"
    elif states and all(each == "overloaded" for each in states):
        status = "overloaded"
    elif reasons or "degraded" in states or "overloaded" in states:
        status = "degraded"
    answering = (model for model in models if model.ready_engines)
    return status, reasons or [trouble for model in answering for trouble in model.troubles]


def model_states(router: Router) -> Iterator[ModelState]:
    """Yield the state of each model, configured models first."""
    threshold = router.settings.memory_pressure_threshold
    for model_id in {**router.supervised.models, **router.registry.models}:
        model = router.registry.models.get(model_id)
        configured = router.supervised.models.get(model_id)
        state: ConfiguredState = "ready" if model is not None and model.ready_engines else "loading"
        if configured is not None and state != "ready" and configured.state != "ready":
            state = configured.state
        status: HealthStatus = "ok" if state == "unloaded" else "degraded"
        if state != "unloaded" and model is not None:
            status = _status(model, threshold)
        yield ModelState(
            id=model_id,
            status=status,
            state=state,
            reason=None if configured is None else configured.reason,
            load_s=None if configured is None else configured.load_s,
            queued=router.dispatcher.num_waiting(model_id),
        )


def _status(model: ModelReplicas, threshold: float) -> HealthStatus:
    ready = model.ready_engines
    if not ready:
        return "degraded"
    pressure = min(engine.memory_pressure for engine in ready)
    if pressure >= threshold:
        return "overloaded"
    return "degraded" if pressure >= _DEGRADED_FROM * threshold else "ok"


def engine_health(engine: Engine) -> EngineHealth:
    return EngineHealth(
        name=engine.name,
        ready=engine.trouble is None,
        trouble=engine.trouble,
        phase=engine.phase,
        stalled_s=round(engine.stalled_s, 1),
        sequences=len(engine.request_ids),
        max_sequences=engine.hello.max_sequences,
        memory_pressure=round(engine.memory_pressure, 4),
        blocks=BlockCounts.of(engine.stats),
        kept_states=engine.stats.kept_states,
        attention=engine.hello.attends_by,
        version=engine.hello.version,
    )


_operation = partial(Operation, tag="Server", access="open")
OPERATIONS = (
    _operation(
        "/health",
        show_health,
        "State of the server, its models and engines",
        response_type=Health,
        statuses=(200, 503),
        errors=(Forbidden,),
    ),
    _operation("/livez", show_livez, "Liveness probe: the process runs", response_type=Liveness),
    _operation(
        "/readyz",
        show_readyz,
        "Readiness probe: a model can answer",
        response_type=Readiness,
        statuses=(200, 503),
        errors=(Forbidden,),
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
