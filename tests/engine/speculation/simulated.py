"""Requests that are decoded step by step on a simulated processor, with a clock of its own."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.speculation.sequence_drafts import DraftRow, SequenceDrafts
from engine.speculation.source import DraftSource, Proposal
from engine.speculation.speculator import SpeculationOptions, Speculator
from tests.shared.submits import submit

PLAIN_S = 0.030
RIGHT, WRONG = 1, 2
"""All tokens of all texts, and one that is none of them."""
REQUEST = submit("a", [RIGHT])


def begin(spec: Speculator, length: int = 1, limit: int = 100) -> DraftRow:
    """Begin a sequence of ``length`` tokens, which may get ``limit`` more."""
    drafts = spec.begin(REQUEST, None)
    assert drafts is not None
    return DraftRow(drafts, [RIGHT] * length, limit)


class Guessing(DraftSource):
    """Claims to be sure, and is right where ``is_right`` says so of the number of an output."""

    def __init__(self, is_right: Callable[[int], bool], name: str = "guessing") -> None:
        self._is_right, self._name = is_right, name

    def propose(self, tokens: Sequence[int], count: int) -> Proposal | None:
        done = len(tokens) - 1
        drafts = (RIGHT if self._is_right(done + i) else WRONG for i in range(count))
        return Proposal(tuple(drafts), self._name, (0,) * count, likely=(0.9,))


@dataclass
class SimulatedRow:
    """One request, and what drafts cost it, in seconds without noise."""

    drafts: SequenceDrafts
    tokens: list[int] = field(default_factory=lambda: [RIGHT])  # with a prompt of one token
    without_s: float = 0.0
    lost_s: float = 0.0
    most_lost: float = 0.0
    """The most that it had ever lost, as a part of what it was allowed to."""

    def step(self, plain_s: float, excess_s: float, accepted: int) -> None:
        self.tokens += [RIGHT] * (accepted + 1)
        self.without_s += (accepted + 1) * plain_s
        self.lost_s += excess_s - accepted * plain_s
        allowed_s = max(2 * plain_s, 0.03 * self.without_s)
        self.most_lost = max(self.most_lost, self.lost_s / allowed_s)

    @property
    def lost(self) -> float:
        return self.lost_s / self.without_s

    @property
    def gain(self) -> float:
        return self.without_s / (self.without_s + self.lost_s)


@dataclass
class Processor:
    """Takes ``draft`` of a step without drafts longer for each draft."""

    draft: float
    noise: Callable[[], float] = lambda: 1.0
    speculator: Speculator = field(init=False)

    def __post_init__(self) -> None:
        self._makers: list[DraftSource] = []
        options = SpeculationOptions(tokens=16, largest_batch=16, protects=True)
        self.speculator = Speculator(options, [lambda request, grammar: self._makers.pop()])

    def run(self, *is_right: Callable[[int], bool], tokens: int = 64) -> list[SimulatedRow]:
        """Decode so many tokens of requests with sources of their own, all at once."""
        rows = []
        for each in is_right:
            self._makers.append(Guessing(each))
            rows.append(SimulatedRow(begin(self.speculator).drafts))
        while left := [row for row in rows if len(row.tokens) <= tokens]:
            self._step(left, tokens)
        return rows

    def _step(self, rows: list[SimulatedRow], tokens: int) -> None:
        spec, num_rows = self.speculator, len(rows)
        asked = [DraftRow(row.drafts, row.tokens, tokens - len(row.tokens)) for row in rows]
        proposals = spec.choose(num_rows, asked)
        drafted = sum(len(each.tokens) for each in proposals if each)
        plain_s, excess_s = PLAIN_S, PLAIN_S * self.draft * drafted
        elapsed_s = (plain_s + excess_s) * self.noise()
        spec.observe_step(num_rows, drafted, elapsed_s, [row.drafts for row in rows])
        for row, ask, proposal in zip(rows, asked, proposals, strict=True):
            wrong = [*proposal.tokens, WRONG].index(WRONG) if proposal else 0
            row.step(plain_s, excess_s, wrong)
            if proposal:
                spec.verified(ask._replace(tokens=row.tokens), proposal, wrong)


@dataclass
class Device(Processor):
    """A device that works while the next step is built, as far as the input tokens of that are in
    flight."""

    alone: float = 0.5
    """What a step takes longer if nothing is in flight, as a multiple of a step."""
    total_s: float = 0.0

    def run(self, *is_right: Callable[[int], bool], tokens: int = 64) -> list[SimulatedRow]:
        rows = []
        for each in is_right:
            self._makers.append(Guessing(each))
            rows.append(SimulatedRow(begin(self.speculator).drafts))
        self.total_s, before = 0.0, _Flight()
        while left := [row for row in rows if len(row.tokens) + before.has(row) <= tokens]:
            step = self._dispatch(left, before, tokens)
            self._apply(before)
            before = step
        self._apply(before)
        return rows

    def _dispatch(self, left: list[SimulatedRow], before: _Flight, tokens: int) -> _Flight:
        """Begin a step of those of ``left`` that do not wait, while the one ``before`` runs."""
        spec, step = self.speculator, _Flight()
        for row in left:
            ask = DraftRow(row.drafts, row.tokens, tokens - len(row.tokens))
            drafts = before.drafts_of(row)
            if before.has(row) and (drafts or spec.waits(ask, len(left))):
                row.drafts.has_waited = True
                step.left_out.append(row)
            else:
                step.rows.append(row)
        if not step.rows:
            return step
        step.has_waited = [row.drafts for row in step.rows if row.drafts.has_waited]
        for waited in step.has_waited:
            waited.has_waited = False
        for row in step.left_out:
            spec.waited(row.drafts, len(step.rows))
        limits = [0 if before.has(row) else tokens - len(row.tokens) for row in step.rows]
        asked = zip(step.rows, limits, strict=True)
        found = spec.choose(
            len(step.rows), [DraftRow(row.drafts, row.tokens, limit) for row, limit in asked]
        )
        step.proposals = [each or Proposal((), "") for each in found]
        step.alone = not before.rows
        step.excess_s = PLAIN_S * (self.draft * step.drafted + self.alone * step.alone)
        if not self.total_s:
            step.begins_s = PLAIN_S * self.alone  # nothing can be in flight before
        self.total_s += PLAIN_S + step.excess_s
        return step

    def _apply(self, step: _Flight) -> None:
        if not step.rows:
            return
        elapsed_s = (PLAIN_S + step.excess_s) * self.noise()
        all_drafts = [row.drafts for row in step.rows]
        self.speculator.observe_step(
            len(step.rows),
            step.drafted,
            elapsed_s,
            all_drafts,
            alone=step.alone,
            waited=step.has_waited,
        )
        for row, proposal in zip(step.rows, step.proposals, strict=True):
            accepted = [*proposal.tokens, WRONG].index(WRONG)
            row.step(PLAIN_S, step.excess_s - step.begins_s, accepted)
            if proposal.tokens:
                self.speculator.verified(DraftRow(row.drafts, row.tokens, 0), proposal, accepted)


@dataclass
class _Flight:
    """A step of a `Device`."""

    rows: list[SimulatedRow] = field(default_factory=list)
    proposals: list[Proposal] = field(default_factory=list)  # of each
    left_out: list[SimulatedRow] = field(default_factory=list)
    has_waited: list[SequenceDrafts] = field(default_factory=list)
    alone: bool = False
    excess_s: float = 0.0
    begins_s: float = 0.0
    """The part of it that the first step of all takes without drafts too."""

    @property
    def drafted(self) -> int:
        return sum(len(each.tokens) for each in self.proposals)

    def has(self, row: SimulatedRow) -> bool:
        return any(each is row for each in self.rows)

    def drafts_of(self, row: SimulatedRow) -> tuple[int, ...]:
        pairs = zip(self.rows, self.proposals, strict=True)
        return next((tuple(proposal.tokens) for each, proposal in pairs if each is row), ())


def noisy(seed: int, spread: float, held_up: float = 0.0) -> Callable[[], float]:
    """Return factors of mean 1 about, some of which (``held_up``) are ten times as large."""
    pick = random.Random(seed)
    return lambda: pick.uniform(1 - spread, 1 + spread) * (10 if pick.random() < held_up else 1)
