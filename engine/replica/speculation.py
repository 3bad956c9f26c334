"""The speculation of one replica, according to its settings."""

from __future__ import annotations

import logging
from functools import partial

from engine.executor.base import ExecutorSpec
from engine.grammar.forced import ForcedSource
from engine.speculation.ngram import NgramSource
from engine.speculation.prediction import PredictionSource
from engine.speculation.source import BatchSource, DraftSource
from engine.speculation.speculator import (
    MAX_DRAFT_TOKENS,
    SourceMaker,
    SpeculationOptions,
    Speculator,
)
from shared.settings import Settings
from shared.wire import Submit

logger = logging.getLogger(__name__)


def make_speculator(
    settings: Settings, spec: ExecutorSpec, draft_model: BatchSource | None = None
) -> Speculator | None:
    """Return the source of drafts, None without speculation, or if the executor of ``spec`` cannot
    verify drafts."""
    if settings.spec_decode == "none":
        return None
    is_auto = settings.spec_decode == "auto"
    if not spec.verifies_drafts:
        level = logging.INFO if is_auto else logging.WARNING
        why = "--spec-decode has no effect: this model's requests are computed %s"
        logger.log(level, why, spec.batching)
        return None
    options = SpeculationOptions(
        tokens=MAX_DRAFT_TOKENS if is_auto else settings.num_speculative_tokens,
        largest_batch=settings.max_batch_size
        if is_auto
        else settings.spec_decode_disable_batch_size,
        min_rate=settings.spec_decode_acceptance_threshold,
        adapts=settings.spec_decode_dynamic or is_auto,
        by_sequence=settings.adaptive_k,
        protects=is_auto,
    )
    sources: list[SourceMaker] = [partial(ForcedSource.of, proposes=is_auto), PredictionSource.of]
    if settings.spec_decode != "draft":
        sources.append(_ngram_maker(settings))
    return Speculator(options, sources, spec.guesses if is_auto else "", draft_model)


def _ngram_maker(settings: Settings) -> SourceMaker:
    def make(request: Submit, grammar: object) -> DraftSource:
        first = 0 if settings.ngram_prompt_lookup else len(request.token_ids)
        whole = len(request.token_ids) + request.max_tokens
        return NgramSource(
            settings.ngram_min, settings.ngram_max, first=first, expected_tokens=whole - first
        )

    return make
