"""Creates the samples shown on the status page (`router.http.status.figures`)."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from msgspec import structs

from router.fleet.engines.engine import Engine
from router.fleet.metrics.recent import Percentiles
from router.fleet.router import Router
from router.fleet.sequences.remote_request import RemoteRequest
from router.http.endpoints.health import (
    BatchTotals,
    ModelState,
    engine_health,
    model_states,
    server_state,
)
from router.http.status.figures import (
    DraftTotals,
    EngineFigures,
    ModelFigures,
    Point,
    PromptProgress,
    PromptTokens,
    Rates,
    ServerStatus,
)
from shared.wire import DraftStats, EngineStats

_SHARES_S = 60.0
_NO_PROMPTS = PromptProgress(prompts=0, computed=0, tokens=0)
_LONG_S = 1.0
"""A prompt is shown as being computed after this time: two heartbeats have reported it then. Short
prompts would come and go between two samples."""
_STALE_S = 3.0
"""Max interval for rates: an earlier sample dates from an earlier viewer."""


@dataclass
class _Heartbeats:
    """The figures of one engine at the times of its heartbeats: one per sample, for the last
    minute."""

    sampled: deque[tuple[float, EngineStats]] = field(default_factory=deque)

    def add(self, engine: Engine) -> None:
        if not self.sampled or self.sampled[-1][0] < engine.last_heartbeat:
            self.sampled.append((engine.last_heartbeat, engine.stats))
        while self.sampled[0][0] < engine.last_heartbeat - _SHARES_S:
            self.sampled.popleft()

    def rates(self) -> Rates | None:
        if len(self.sampled) < 2:
            return None
        (before, earlier), (at, latest) = self.sampled[-2], self.sampled[-1]
        seconds = at - before
        if seconds > _STALE_S or time.monotonic() - at > _STALE_S:
            return None
        generated = latest.generated_tokens_total - earlier.generated_tokens_total
        prompt = latest.prompt_tokens_total - earlier.prompt_tokens_total
        steps = latest.steps_total - earlier.steps_total
        rows = latest.batch_rows_total - earlier.batch_rows_total
        step_s = latest.step_seconds_total - earlier.step_seconds_total
        return Rates(
            generated=round(generated / seconds, 1),
            prompt=round(prompt / seconds, 1),
            steps=round(steps / seconds, 1),
            batch=round(rows / steps, 2) if steps > 0 else None,
            step_s=round(step_s / steps, 5) if steps > 0 else None,
        )

    def prompts(self) -> PromptTokens:
        """Return where the prompt tokens of the last minute came from."""
        return _prompts(self.sampled[-1][1], self.sampled[0][1])


class StatusSampler:
    """Creates samples. Rates are computed between a sample and the previous one.

    A sample of 1,000 engines takes 15 ms on the event loop, and its event has 600 kB."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._heartbeats: dict[Engine, _Heartbeats] = {}
        self._gaps: dict[str, tuple[float, int]] = {}
        """By model: sum and count of the times between tokens, at the last sample."""

    def sample(self, viewers: int) -> ServerStatus:
        """Return the state."""
        router = self._router
        before = self._heartbeats
        self._heartbeats = {e: before.get(e, _Heartbeats()) for e in router.registry.engines}
        computing = _long_prompts(router.dispatcher.in_flight)
        engines = {e.name: self._engine(e, computing.get(e)) for e in self._heartbeats}
        state, reasons = server_state(router)
        first_token, of_models = router.metrics.recent.first_tokens()
        models = [self._model(each, engines, of_models) for each in model_states(router)]
        known = [each.rates for each in engines.values() if each.rates is not None]
        return ServerStatus(
            started=router.started,
            version=router.version,
            status=state,
            reasons=reasons,
            now=Point(
                at=round(time.time(), 3),
                generated=round(sum(each.generated for each in known), 1),
                prompt=round(sum(each.prompt for each in known), 1),
                running=sum(each.sequences for each in engines.values()),
                queued=sum(model.queued for model in models),
                batch=_mean_batch(known),
                first_token=None if first_token is None else first_token.p50,
                hit_rate=_hit_rate(each.recent_prompts for each in engines.values()),
                memory_pressure=max((e.memory_pressure for e in engines.values()), default=0.0),
            ),
            first_token=first_token,
            loop_lag_s=round(router.loop_lag.worst_s(), 4),
            viewers=viewers,
            batches=BatchTotals.of(router),
            models=models,
            engines=engines,
            incidents=router.metrics.recent.incidents,
        )

    def _model(
        self,
        model: ModelState,
        engines: dict[str, EngineFigures],
        first_tokens: dict[str, Percentiles],
    ) -> ModelFigures:
        router = self._router
        replicas = router.registry.models.get(model.id)
        configured = router.supervised.models.get(model.id)
        hello = None if replicas is None else replicas.hello
        names = replicas.names if replicas else configured.names if configured else [model.id]
        own = [engine.name for engine in router.registry.engines_of(model.id)]
        rates = (engines[name].rates for name in own)
        return ModelFigures(
            **structs.asdict(model),
            aliases=names[1:],
            adapters=[] if replicas is None else list(replicas.adapters),
            context_length=None if hello is None else hello.context_length,
            kv_bits=None if hello is None else hello.kv_bits,
            capabilities=[] if replicas is None else replicas.capabilities,
            generated=round(sum(each.generated for each in rates if each is not None), 1),
            first_token=first_tokens.get(model.id),
            between_tokens_s=self._between_tokens_s(model.id),
            engines=own,
        )

    def _between_tokens_s(self, model: str) -> float | None:
        """Return the mean time between two deltas since the last sample."""
        series = self._router.metrics.inter_token.labels(model)
        total_s, count = series.sum, sum(series.counts)
        total_before_s, count_before = self._gaps.get(model, (total_s, count))
        self._gaps[model] = (total_s, count)
        if count <= count_before:
            return None
        return round((total_s - total_before_s) / (count - count_before), 5)

    def _engine(self, engine: Engine, computing: PromptProgress | None) -> EngineFigures:
        stats, heartbeats = engine.stats, self._heartbeats[engine]
        heartbeats.add(engine)
        return EngineFigures(
            **structs.asdict(engine_health(engine)),
            is_lost=engine.lost_reason is not None,
            silence_s=round(engine.silence_s, 1),
            running=stats.running,
            waiting=stats.waiting,
            rates=heartbeats.rates(),
            memory_limit_bytes=stats.limit_bytes,
            active_memory_bytes=stats.active_memory_bytes,
            recent_prompts=heartbeats.prompts(),
            prompts=_prompts(stats, EngineStats()),
            ssd=engine.store,
            drafts=None if stats.drafts is None else _drafts(stats.drafts),
            preemptions=stats.preemptions_total,
            losses=self._router.metrics.recent.losses[engine.name],
            computing=computing,
        )


def _long_prompts(in_flight: Iterable[RemoteRequest]) -> dict[Engine, PromptProgress]:
    """Return the progress of the prompts that engines have had for `_LONG_S`, by engine."""
    found: dict[Engine, PromptProgress] = {}
    placed_before = time.monotonic() - _LONG_S
    for request in in_flight:
        engine = request.engine
        computed, tokens = request.computed_prompt_tokens, request.num_prompt_tokens
        if engine is None or computed is None or computed == tokens:
            continue
        if request.placed_at < placed_before:
            others = found.get(engine, _NO_PROMPTS)
            found[engine] = PromptProgress(
                prompts=others.prompts + 1,
                computed=others.computed + computed,
                tokens=others.tokens + tokens,
            )
    return found


def _prompts(latest: EngineStats, earlier: EngineStats) -> PromptTokens:
    return PromptTokens(
        ram=latest.cached_ram_tokens_total - earlier.cached_ram_tokens_total,
        ssd=latest.cached_ssd_tokens_total - earlier.cached_ssd_tokens_total,
        computed=latest.prefill_tokens_total - earlier.prefill_tokens_total,
    )


def _drafts(stats: DraftStats) -> DraftTotals:
    sources = stats.sources.values()
    return DraftTotals(
        drafted=sum(each.drafted for each in sources),
        accepted=sum(each.accepted for each in sources),
        saved_s=round(sum(each.saved_s for each in sources), 1),
    )


def _mean_batch(rates: list[Rates]) -> float | None:
    """Return the mean number of rows per step, over the steps of all engines."""
    steps = sum(each.steps for each in rates)
    rows = sum(each.steps * (each.batch or 0.0) for each in rates)
    return round(rows / steps, 2) if steps else None


def _hit_rate(prompts: Iterable[PromptTokens]) -> float | None:
    """Return the fraction of prompt tokens found in a cache; None if there are none."""
    found = computed = 0
    for each in prompts:
        found += each.ram + each.ssd
        computed += each.computed
    return round(found / (found + computed), 4) if found + computed else None
