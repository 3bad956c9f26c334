"""The figures of a measurement. docs/bench.md defines them, like vLLM's `bench serve` and aiperf.

Times are milliseconds.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from services.measuring.answers import StreamedAnswer
from services.measuring.load import JoinRecord, LoadRecord

Measure = Literal["ttft", "tpot", "e2el"]
Limits = Mapping[Measure, float]
"""Max milliseconds of a good request."""


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds. Percentiles are interpolated like NumPy's."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Distribution | None:
        if not seconds:
            return None
        ms = sorted(1000 * each for each in seconds)
        return cls(
            count=len(ms),
            mean=statistics.fmean(ms),
            p50=percentile(ms, 50),
            p90=percentile(ms, 90),
            p99=percentile(ms, 99),
            max=ms[-1],
        )


class GroupFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of one kind within a workload."""

    ttft_ms: Distribution
    input_tokens: int
    cached_tokens: int


class JoinFigures(msgspec.Struct, frozen=True, kw_only=True):
    """A long prompt that joined running streams."""

    longest_gap_ms: Distribution | None
    """Of each stream running at the time."""
    ttft_ms: Distribution | None
    ttft_alone_ms: Distribution | None


class Level(msgspec.Struct, frozen=True, kw_only=True):
    """One level of load."""

    concurrency: int | None
    request_rate: float | None
    completed: int
    cancelled: int
    errors: dict[str, int]
    details: dict[str, str]
    """The server's message at the first occurrence of each error."""
    duration_s: float
    request_throughput: float
    output_throughput: float
    total_token_throughput: float
    goodput: float | None
    """Completed requests per second within the limits; None without limits."""
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    has_usage: bool
    """False if the server sent no usage: events then count as tokens, and prompt tokens are
    unknown."""
    ttft_ms: Distribution | None
    tpot_ms: Distribution | None
    itl_ms: Distribution | None
    e2el_ms: Distribution | None
    groups: dict[str, GroupFigures]
    join: JoinFigures | None = None

    @property
    def failed(self) -> int:
        return sum(self.errors.values())


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Return a percentile of values in ascending order, with interpolation."""
    at = (len(ordered) - 1) * percent / 100
    low, high = ordered[math.floor(at)], ordered[math.ceil(at)]
    return low + (high - low) * (at - math.floor(at))


def e2el_s(answer: StreamedAnswer) -> float:
    """Return the seconds from the request to the last text."""
    return answer.times[-1]


def tpot_s(answer: StreamedAnswer) -> float | None:
    """Return the mean seconds per token after the first; None if there is no second token."""
    if answer.completion_tokens < 2:
        return None
    return (e2el_s(answer) - answer.first_s) / (answer.completion_tokens - 1)


def is_good(answer: StreamedAnswer, limits: Limits) -> bool:
    """Return whether a completed request is within ``limits``. Without a second token there is no
    TPOT to exceed a limit."""
    tpot = tpot_s(answer)
    found = {"ttft": answer.first_s, "tpot": tpot or 0.0, "e2el": e2el_s(answer)}
    return all(1000 * found[name] <= most for name, most in limits.items())


def level_of(
    records: Sequence[LoadRecord],
    joins: Sequence[JoinRecord],
    *,
    concurrency: int | None,
    request_rate: float | None,
    cancelled: int,
    duration_s: float,
    limits: Limits,
) -> Level:
    """Return the figures of the records of ``duration_s``."""
    failed = [each.answer for each in records if each.answer.error]
    good = [each for each in records if not each.answer.error]
    answers = [each.answer for each in good]
    outputs = sum(each.completion_tokens for each in answers)
    inputs = sum(each.prompt_tokens for each in answers)
    within = sum(is_good(each, limits) for each in answers)
    gaps = (b - a for each in answers for a, b in itertools.pairwise(each.times))
    tpots = (tpot for each in answers if (tpot := tpot_s(each)) is not None)
    details: dict[str, str] = {}
    for each in failed:
        details.setdefault(str(each.error), each.detail)
    return Level(
        concurrency=concurrency,
        request_rate=request_rate,
        completed=len(answers),
        cancelled=cancelled,
        errors=dict(Counter(str(each.error) for each in failed)),
        details=details,
        duration_s=duration_s,
        request_throughput=len(answers) / duration_s,
        output_throughput=outputs / duration_s,
        total_token_throughput=(inputs + outputs) / duration_s,
        goodput=within / duration_s if limits else None,
        input_tokens=inputs,
        cached_tokens=sum(each.cached_tokens for each in answers),
        output_tokens=outputs,
        has_usage=all(each.has_usage for each in answers),
        ttft_ms=Distribution.of([each.first_s for each in answers]),
        tpot_ms=Distribution.of(list(tpots)),
        itl_ms=Distribution.of(list(gaps)),
        e2el_ms=Distribution.of([e2el_s(each) for each in answers]),
        groups=_groups(good),
        join=_join(joins),
    )


def _groups(good: Sequence[LoadRecord]) -> dict[str, GroupFigures]:
    found: dict[str, GroupFigures] = {}
    for name in dict.fromkeys(each.group for each in good if each.group):
        answers = [each.answer for each in good if each.group == name]
        ttft = Distribution.of([each.first_s for each in answers])
        assert ttft is not None
        found[name] = GroupFigures(
            ttft_ms=ttft,
            input_tokens=sum(each.prompt_tokens for each in answers),
            cached_tokens=sum(each.cached_tokens for each in answers),
        )
    return found


def _join(joins: Sequence[JoinRecord]) -> JoinFigures | None:
    if not joins:
        return None
    joined = [each.joiner.first_s for each in joins if not each.joiner.error]
    alone = [each.alone.first_s for each in joins if not each.alone.error]
    return JoinFigures(
        longest_gap_ms=Distribution.of([gap for each in joins for gap in each.gaps_s]),
        ttft_ms=Distribution.of(joined),
        ttft_alone_ms=Distribution.of(alone),
    )
