"""How long a sequence may wait: for an engine, for its first token, and for each further token."""

from __future__ import annotations

from router.errors import ApiError, EngineLost, GenerationTimeout, Unavailable
from router.fleet.sequences.remote_request import InFlight, RemoteRequestState


def overdue(entry: InFlight, now: float, *, loaded_on_demand: bool) -> ApiError | None:
    """Return the reason why a sequence must end at ``now`` (from ``time.monotonic``), if any.

    ``loaded_on_demand``: its model has no engine, but will get one. Lines of batches wait until
    their batch expires, because others go first.
    """
    settings, sequence = entry.model.settings, entry.sequence
    if sequence.tenant.background:
        return None
    is_waiting = sequence.state is RemoteRequestState.WAITING
    if sequence.first_token_at is None:
        limit_s = settings.first_token_timeout_s
        if now - sequence.arrived_at > limit_s:
            why = f": {sequence.refusal}" if sequence.refusal else ""
            return GenerationTimeout(f"No token was generated within {limit_s:g} s{why}.")
    elif not is_waiting or entry.model.ready_engines:
        limit_s = settings.request_timeout_s
        if now - max(sequence.last_token_at, sequence.placed_at, sequence.queued_at) > limit_s:
            return GenerationTimeout(f"No further token was generated within {limit_s:g} s.")
    if is_waiting:
        for_adapters = sequence.names_adapter
        unready_s = entry.model.unready_for_s(now, for_adapters=for_adapters)
        waited_s = min(now - sequence.queued_at, unready_s)
        limit_s = settings.restart_wait_s
        if loaded_on_demand:
            limit_s = settings.first_token_timeout_s
        if waited_s > limit_s:
            return engine_lost(limit_s) if sequence.losses else _no_engine(limit_s, for_adapters)
    return None


def engine_lost(wait_s: float) -> EngineLost:
    return EngineLost("The engine that served this request was lost.", retry_after_s=wait_s)


def not_ready(reason: str) -> Unavailable:
    return Unavailable(
        f"The model is not ready: {reason}.", code="no_engine_ready", retry_after_s=5
    )


def _no_engine(waited_s: float, for_adapters: bool) -> Unavailable:
    kind = "that takes adapters " if for_adapters else ""
    return Unavailable(
        f"No engine of this model {kind}became ready within {waited_s:g} s.",
        code="no_engine_ready",
        retry_after_s=waited_s,
    )
