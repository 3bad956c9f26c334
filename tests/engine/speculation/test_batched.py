"""How many tokens a source of all sequences is asked for, by chances and by costs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from engine.speculation.batch_costs import PLAIN_FIRST
from engine.speculation.batched import CALLS_WITHOUT
from engine.speculation.source import BatchSource, DraftRequest, DraftSource, Proposal
from engine.speculation.speculator import SpeculationOptions, Speculator
from tests.engine.speculation.simulated import begin


class Model(BatchSource):
    """Notes what it is asked for, and takes ``token_s`` for a token of all sequences."""

    NAME = "draft"
    max_sequences = 2
    is_usable = True

    def __init__(self) -> None:
        self.token_s = 0.0
        self.asked: list[int] = []
        self.now_s = 0.0

    def propose(self, asked: Sequence[DraftRequest]) -> list[tuple[int, ...]]:
        self.asked = [request.limit for request in asked]
        self.now_s += self.token_s * max(self.asked)
        return [(7,) * request.limit for request in asked]


class Other(DraftSource):
    def __init__(self, length: int, likely: float) -> None:
        self._proposal = Proposal((5,) * length, "other", likely=(likely,))

    def propose(self, tokens: Sequence[int], count: int) -> Proposal | None:
        return self._proposal if self._proposal.tokens else None


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Model:
    """A source whose time is that of the clock."""
    model = Model()
    monkeypatch.setattr("engine.speculation.batched.perf_counter", lambda: model.now_s)
    return model


def speculator(model: Model, *, adapts: bool = True, other: Other | None = None) -> Speculator:
    options = SpeculationOptions(adapts=adapts, largest_batch=16)
    makers = [] if other is None else [lambda request, grammar: other]
    return Speculator(options, makers, batch_source=model)


def with_costs(spec: Speculator, base_s: float, token_s: float) -> None:
    for drafted in (*range(16), *[0] * PLAIN_FIRST):
        spec.observe_step(1, drafted, base_s + token_s * (1 + drafted))


def test_without_control_it_is_asked_where_there_is_no_other_draft() -> None:
    model = Model()
    spec = speculator(model, adapts=False)
    found = spec.choose(4, [begin(spec, limit=limit) for limit in (100, 3, 100, 0)])
    assert model.asked == [5, 3]  # the most sequences that it takes
    tokens = [proposal.tokens if proposal else () for proposal in found]
    assert tokens == [(7,) * 5, (7,) * 3, (), ()]
    spec = speculator(model, adapts=False, other=Other(2, 0.1))
    (proposal,) = spec.choose(1, [begin(spec)])
    assert proposal is not None and proposal.source == "other"


def test_it_is_asked_where_its_drafts_are_better_than_others() -> None:
    for likely, source in ((0.2, "draft"), (0.95, "other")):
        spec = speculator(Model(), other=Other(5, likely))
        with_costs(spec, 0.1, 0.001)
        (proposal,) = spec.choose(1, [begin(spec)])
        assert proposal is not None and proposal.source == source


@pytest.mark.parametrize(
    ("accepted", "asked"), [(5, [5]), (1, [1]), (0, [])], ids=["all", "one", "none"]
)
def test_it_is_asked_for_as_many_as_pay_for_its_steps(
    model: Model, accepted: int, asked: list[int]
) -> None:
    """A token of it takes a fifth of a step of the target, which costs little more for more."""
    model.token_s = 0.004
    spec = speculator(model)
    with_costs(spec, 0.02, 0.0002)
    row = begin(spec)
    spec.choose(1, [row])  # its time is known from now on
    for _ in range(30):
        spec.verified(row, Proposal((7,) * 5, "draft", likely=(0.6,)), accepted)
    model.asked = []
    spec.choose(1, [row._replace(tokens=[1] * 500)])
    assert model.asked == asked


def test_others_do_not_wait_for_its_drafts_beyond_their_limit(model: Model) -> None:
    plain_s = 0.001
    options = SpeculationOptions(largest_batch=16, protects=True)
    spec = Speculator(options, [], batch_source=model)
    for drafted in (*range(8), *[0] * PLAIN_FIRST):
        spec.observe_step(2, drafted, plain_s)
    model.token_s = 0.3 * plain_s
    author, other = begin(spec), begin(spec, limit=0)
    for _ in range(60):
        proposal, _ = spec.choose(2, [author, other])
        drafted = len(proposal.tokens) if proposal else 0
        spec.observe_step(2, drafted, plain_s, [author.drafts, other.drafts])
        if proposal:
            spec.verified(author, proposal, drafted)
    assert 0 < model.now_s <= max(2, 0.03 * 60) * plain_s


def test_a_source_that_can_propose_nothing_any_more_is_not_asked(model: Model) -> None:
    spec = speculator(model)
    with_costs(spec, 0.001, 0.0001)
    row = begin(spec)
    row.drafts.account.without_s = 10.0
    assert spec.waits(row, 1)
    model.is_usable = False
    assert not spec.waits(row, 1)
    model.asked = []
    assert spec.choose(1, [row]) == [None] and not model.asked


def test_its_time_counts_against_what_drafts_save(model: Model) -> None:
    model.token_s = 0.01
    spec = speculator(model, adapts=False)
    spec.choose(1, [begin(spec)])
    spec.observe_step(1, 0, 0.001)
    spent = spec.stats().sources["draft"]
    assert spent.spent_s == pytest.approx(0.05)
    assert spent.saved_s == pytest.approx(-0.05)


def test_sequences_wait_for_its_drafts_only_while_they_are_worth_while(model: Model) -> None:
    model.token_s = 0.004
    spec = speculator(model)
    row = begin(spec)
    row.drafts.account.without_s = 10.0  # it has been decoding for long
    assert not spec.waits(row, 1)  # it is not known yet what a step without drafts takes
    for _ in range(PLAIN_FIRST):
        spec.observe_step(1, 0, 0.002)
    assert spec.waits(row, 1)
    assert not spec.waits(row._replace(limit=1), 1)  # nothing after the token in flight
    with_costs(spec, 0.001, 0.001)
    spec.choose(1, [row])
    spec.choose(1, [row])  # a token of it takes as long as four steps
    waits = [spec.waits(row, 1) for _ in range(2 * CALLS_WITHOUT)]
    assert waits.count(True) == 2
