"""How long a sequence may wait: for an engine, for its first token, and for each further token."""

from __future__ import annotations

from router.errors import ApiError, EngineLost, GenerationTimeout, Unavailable
from router.fleet.sequences.remote_request import RemoteRequest, RemoteRequestState

LOST = "lost"
"""Code of the error of a line of a batch that an engine has lost, and no other engine has taken."""


def overdue(request: RemoteRequest, now: float, *, loaded_on_demand: bool) -> ApiError | None:
    """Return the reason why a sequence must end at ``now`` (from ``time.monotonic``), if any.

    ``loaded_on_demand``: its model has no engine, but will get one.
    """
    settings = request.model.settings
    is_waiting = request.state is RemoteRequestState.WAITING
    no_engine_s = settings.restart_wait_s
    if loaded_on_demand:
        no_engine_s = settings.first_token_timeout_s
    if request.tenant.background:
        return _to_try_again(request, now, no_engine_s) if is_waiting else None
    if request.first_token_at is None:
        limit_s = settings.first_token_timeout_s
        if now - request.arrived_at > limit_s:
            why = f": {request.refusal}" if request.refusal else ""
            return GenerationTimeout(f"No token was generated within {limit_s:g} s{why}.")
    elif not is_waiting or request.model.ready_engines:
        limit_s = settings.request_timeout_s
        if now - max(request.last_token_at, request.placed_at, request.queued_at) > limit_s:
            return GenerationTimeout(f"No further token was generated within {limit_s:g} s.")
    if is_waiting:
        waited_s = min(now - request.queued_at, _unready_s(request, now))
        if waited_s > no_engine_s:
            if request.losses:
                return engine_lost(no_engine_s)
            return _no_engine(no_engine_s, request.names_adapter)
    return None


def _to_try_again(request: RemoteRequest, now: float, limit_s: float) -> Unavailable | None:
    """Return the reason why a line of a batch, which is in the queue, must leave its place to lines
    for other models, and be tried again, if there is one. It has no other timeouts."""
    if now - request.queued_at <= limit_s:
        return None
    if _unready_s(request, now) > limit_s:
        code = LOST if request.losses else "no_engine_ready"
        return _no_engine(limit_s, request.names_adapter, code)
    if request.is_alone and not request.has_output:  # else the other parts would be lost
        return Unavailable(f"No row was free for {limit_s:g} s.", code="no_free_row")
    return None


def _unready_s(request: RemoteRequest, now: float) -> float:
    return request.model.unready_for_s(now, for_adapters=request.names_adapter)


def engine_lost(wait_s: float) -> EngineLost:
    return EngineLost("The engine that served this request was lost.", retry_after_s=wait_s)


def not_ready(reason: str) -> Unavailable:
    return Unavailable(
        f"The model is not ready: {reason}.", code="no_engine_ready", retry_after_s=5
    )


def _no_engine(waited_s: float, for_adapters: bool, code: str = "no_engine_ready") -> Unavailable:
    kind = "that takes adapters " if for_adapters else ""
    return Unavailable(
        f"No engine of this model {kind}became ready within {waited_s:g} s.",
        code=code,
        retry_after_s=waited_s,
    )
