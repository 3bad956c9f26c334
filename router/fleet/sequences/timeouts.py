"""How long a sequence may wait: for an engine, for its first token, and for each further one."""

from __future__ import annotations

from router.errors import ApiError, EngineLost, GenerationTimeout, Unavailable
from router.fleet.sequences.remote_request import InFlight, RemoteRequestState


def overdue(entry: InFlight, now: float, *, loaded_on_demand: bool) -> ApiError | None:
    """Return why a sequence has to end at ``now`` (of ``time.monotonic``), if so.

    ``loaded_on_demand``: its model has no engine, and will get one. Lines of batches wait as long
    as their batch has time: others go before them.
    """
    settings, sequence = entry.model.settings, entry.sequence
    if sequence.tenant.background:
        return None
    is_waiting = sequence.state is RemoteRequestState.WAITING
    if sequence.first_token_at is None:
        limit_s = settings.first_token_timeout_s
        if now - sequence.arrived_at > limit_s:
            return GenerationTimeout(f"No token came within {limit_s:g} s.")
    elif not is_waiting or entry.model.ready_engines:
        limit_s = settings.request_timeout_s
        if now - max(sequence.last_token_at, sequence.placed_at, sequence.queued_at) > limit_s:
            return GenerationTimeout(f"The generation was silent for {limit_s:g} s.")
    if is_waiting:
        waited_s = min(now - sequence.queued_at, entry.model.unready_for_s(now))
        limit_s = settings.restart_wait_s
        if loaded_on_demand:
            limit_s = settings.first_token_timeout_s
        if waited_s > limit_s:
            return engine_lost(limit_s) if sequence.losses else _no_engine(limit_s)
    return None


def engine_lost(wait_s: float) -> EngineLost:
    return EngineLost("The engine that served this request was lost.", retry_after_s=wait_s)


def not_ready(reason: str) -> Unavailable:
    return Unavailable(
        f"The model is not ready: {reason}.", code="no_engine_ready", retry_after_s=5
    )


def _no_engine(waited_s: float) -> Unavailable:
    return Unavailable(
        f"No engine of this model became ready within {waited_s:g} s.",
        code="no_engine_ready",
        retry_after_s=waited_s,
    )
