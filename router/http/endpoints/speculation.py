"""`/v1/spec_decode/metrics`: statistics of speculative decoding."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from router.api.body import json_response
from router.api.operations import Operation
from router.fleet.engines.engine import ModelReplicas
from router.fleet.router import Router
from router.fleet.tenants.tenant import Tenant
from shared.wire import DraftCounts, DraftStats


class DraftFigures(Struct, frozen=True, kw_only=True):
    """The outcome of drafts."""

    proposals: Annotated[int, Meta(description="Runs of draft tokens that were verified.")]
    drafted_tokens: int
    accepted_tokens: int
    saved_s: Annotated[
        float,
        Meta(
            description="Decode time saved by drafts, in seconds, from the known time of steps "
            "without drafts; negative if they cost more than they saved."
        ),
    ]
    spent_s: Annotated[
        float, Meta(description="Seconds spent on drafting, already subtracted from `saved_s`.")
    ]
    acceptance_rate: Annotated[
        float | None,
        Meta(description="Acceptance rate: accepted of drafted tokens; null without any."),
    ]
    accepted_per_proposal: Annotated[
        float | None, Meta(description="Accepted tokens per run of drafts.")
    ]


class EngineSpeculation(Struct, frozen=True, kw_only=True):
    name: str
    sources: Annotated[dict[str, DraftFigures], Meta(description="By source of the drafts.")]
    total: DraftFigures
    acceptance: Annotated[
        dict[str, float],
        Meta(description="Current acceptance probability, by source and kind of draft."),
    ]
    step_s: Annotated[
        dict[str, float],
        Meta(description="Seconds of a decode step, by the number of tokens that it computes."),
    ]


class ModelSpeculation(Struct, frozen=True, kw_only=True):
    id: str
    total: DraftFigures
    engines: Annotated[list[EngineSpeculation], Meta(description="Engines that speculate.")]


class Speculation(Struct, frozen=True, kw_only=True):
    """Since the start of each engine."""

    total: DraftFigures
    models: list[ModelSpeculation]


async def show_speculation(http: Request) -> Response:
    router: Router = http.app.state.router
    tenant: Tenant = http.state.tenant
    models = [model for model in router.registry.models.values() if tenant.may_use(model.names)]
    return json_response(
        Speculation(
            total=_sum(stats for model in models for _, stats in _speculating(model)),
            models=[
                ModelSpeculation(
                    id=model.id,
                    total=_sum(stats for _, stats in _speculating(model)),
                    engines=[_engine(name, stats) for name, stats in _speculating(model)],
                )
                for model in models
            ],
        )
    )


def _speculating(model: ModelReplicas) -> list[tuple[str, DraftStats]]:
    """Return the engines of ``model`` that speculate, by name."""
    found = [(engine.name, engine.stats.drafts) for engine in model.engines]
    return [(name, stats) for name, stats in found if stats is not None]


def _engine(name: str, stats: DraftStats) -> EngineSpeculation:
    return EngineSpeculation(
        name=name,
        sources={source: _figures([counts]) for source, counts in stats.sources.items()},
        total=_sum([stats]),
        acceptance={kind: round(rate, 3) for kind, rate in stats.rates.items()},
        step_s={tokens: round(seconds, 5) for tokens, seconds in stats.step_s.items()},
    )


def _sum(stats: Iterable[DraftStats]) -> DraftFigures:
    return _figures([counts for each in stats for counts in each.sources.values()])


def _figures(counts: list[DraftCounts]) -> DraftFigures:
    proposals = sum(each.proposals for each in counts)
    drafted = sum(each.drafted for each in counts)
    accepted = sum(each.accepted for each in counts)
    return DraftFigures(
        proposals=proposals,
        drafted_tokens=drafted,
        accepted_tokens=accepted,
        saved_s=round(sum(each.saved_s for each in counts), 3),
        spent_s=round(sum(each.spent_s for each in counts), 3),
        acceptance_rate=round(accepted / drafted, 4) if drafted else None,
        accepted_per_proposal=round(accepted / proposals, 4) if proposals else None,
    )


OPERATIONS = (
    Operation(
        "/v1/spec_decode/metrics",
        show_speculation,
        "Statistics of speculative decoding",
        "Server",
        response_type=Speculation,
    ),
)
