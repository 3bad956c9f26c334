"""How the server is, for people, probes and load balancers."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from router.fleet.engines import Engine, Model
from router.fleet.router import Router

_DEGRADED_FROM = 0.72
"""Part of the memory pressure threshold above which the state is "degraded"."""


HealthStatus = Literal["ok", "degraded", "overloaded", "shutting_down"]


class Liveness(Struct, frozen=True):
    status: Literal["ok"] = "ok"


class Readiness(Struct, frozen=True):
    """``reasons`` say why it is not ready."""

    status: Literal["ready", "not ready"]
    reasons: list[str]


class BlockCounts(Struct, frozen=True, kw_only=True):
    total: int
    used: int
    free: int


class EngineHealth(Struct, frozen=True, kw_only=True):
    """``memory_pressure`` is what cannot be evicted, as a part of the KV memory."""

    name: str
    ready: bool
    trouble: str | None
    phase: str
    stalled_s: float
    sequences: int
    max_sequences: int
    memory_pressure: float
    blocks: BlockCounts
    kept_states: int
    version: str


class ModelHealth(Struct, frozen=True, kw_only=True):
    id: str
    status: HealthStatus
    queued: int
    engines: list[EngineHealth]


class Health(Struct, frozen=True, kw_only=True):
    """``requests`` counts those running and waiting."""

    status: HealthStatus
    version: str
    reasons: list[str]
    requests: int
    models: list[ModelHealth]


def unready_reasons(router: Router) -> list[str]:
    """Why the server is not ready; empty when every model has an engine that is."""
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


def health_report(router: Router) -> tuple[int, Health]:
    """The HTTP status and the body. The state of the server is that of its worst model;
    one without a ready engine makes it degraded, with a 503."""
    models = list(router.registry.models.values())
    threshold = router.settings.memory_pressure_threshold
    reasons = unready_reasons(router)
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


def _state(model: Model, threshold: float) -> HealthStatus:
    ready = model.ready_engines
    if not ready:
        return "degraded"
    pressure = min(engine.memory_pressure for engine in ready)
    if pressure >= threshold:
        return "overloaded"
    return "degraded" if pressure >= _DEGRADED_FROM * threshold else "ok"


def _engine(engine: Engine) -> EngineHealth:
    return EngineHealth(
        name=engine.name,
        ready=engine.trouble is None,
        trouble=engine.trouble,
        phase=engine.phase,
        stalled_s=round(engine.stalled_s, 1),
        sequences=len(engine.sequences),
        max_sequences=engine.hello.max_sequences,
        memory_pressure=round(engine.memory_pressure, 4),
        blocks=BlockCounts(
            total=engine.stats.total_blocks,
            used=engine.stats.used_blocks,
            free=engine.stats.free_blocks,
        ),
        kept_states=engine.stats.kept_states,
        version=engine.hello.version,
    )
