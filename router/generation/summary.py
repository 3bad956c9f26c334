"""The outcome of a request in figures, for logs and traces. Never its text."""

from __future__ import annotations

from typing import NamedTuple

from router.generation.generation import Generation


class GenerationSummary(NamedTuple):
    """The figures of one request. Times are from ``time.monotonic``; None: that point was not
    reached."""

    id: str
    """The answer's id, which names its sequences in engines and in the log."""
    model: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    arrived_at: float | None
    placed_at: float | None
    """When an engine received the first of the sequences."""
    first_token_at: float | None
    finish: str
    """Why it ended: the finish reasons of its choices, or an error code."""


def summarize(generation: Generation) -> GenerationSummary:
    sequences = [choice.sequence for choice in generation.choices]
    usage = generation.usage()
    reasons = {choice.finish_reason for choice in generation.choices} - {None}
    errors = {one.error.code for one in sequences if one.error is not None} - {None}
    return GenerationSummary(
        id=generation.request_id,
        model=generation.model.names[0],
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.prompt_tokens_details.cached_tokens,
        output_tokens=sum(len(one.output_token_ids) for one in sequences),
        arrived_at=min((one.arrived_at for one in sequences), default=None),
        placed_at=min(
            (one.first_placed_at for one in sequences if one.first_placed_at), default=None
        ),
        first_token_at=min(
            (one.first_token_at for one in sequences if one.first_token_at is not None),
            default=None,
        ),
        finish=",".join(sorted(map(str, errors or reasons))) or "cut",
    )
