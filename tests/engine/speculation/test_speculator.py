"""How much is drafted: by acceptance, by batch size and by what steps cost."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from engine.speculation.batch_costs import PLAIN_FIRST, BatchCosts
from engine.speculation.costs import StepCosts
from engine.speculation.prediction import PredictionSource
from engine.speculation.sequence_drafts import DraftRow
from engine.speculation.source import DraftSource, Proposal
from engine.speculation.speculator import PROBE_TOKENS, SpeculationOptions, Speculator
from tests.engine.speculation.simulated import begin


class Fixed(DraftSource):
    """Proposes the same in every step."""

    def __init__(self, name: str, length: int, likely: float = 0.5) -> None:
        self._proposal = Proposal((7,) * length, name, likely=(likely,))

    def propose(self, tokens: Sequence[int], count: int) -> Proposal | None:
        return self._proposal._replace(tokens=self._proposal.tokens[:count])


def speculator(*sources: DraftSource, **options: Any) -> Speculator:
    made = [lambda request, grammar, source=source: source for source in sources]
    return Speculator(SpeculationOptions(**options), made)


def lengths(spec: Speculator, *rows: DraftRow, num_rows: int = 0) -> list[int]:
    found = spec.choose(num_rows or len(rows), rows)
    return [len(proposal.tokens) if proposal else 0 for proposal in found]


def with_costs(spec: Speculator, base_s: float, token_s: float, rows: int = 1) -> None:
    """Let it know steps of ``rows`` sequences with up to five drafts each."""
    for drafted in (*range(5 * rows + 1), *[0] * PLAIN_FIRST):
        spec.observe_step(rows, drafted, base_s + token_s * (rows + drafted))


def verify(spec: Speculator, row: DraftRow, accepted: int, times: int = 1) -> None:
    for _ in range(times):
        spec.verified(row, Proposal((7,) * 5, "f"), accepted)


def observe(costs: StepCosts, times: int, *steps: tuple[int, float]) -> None:
    """Let ``costs`` know each of ``steps``, tokens and seconds, so many times."""
    for _ in range(times):
        for tokens, seconds in steps:
            costs.observe(tokens, seconds)


def test_nothing_is_drafted_in_large_batches_nor_beyond_the_limits() -> None:
    spec = speculator(Fixed("f", 9), tokens=5, largest_batch=4, adapts=False)
    assert lengths(spec, begin(spec, limit=3), begin(spec, limit=0), begin(spec)) == [3, 0, 5]
    assert lengths(spec, begin(spec), num_rows=4) == [5]
    assert lengths(spec, begin(spec), num_rows=5) == [0]


def test_a_sequence_whose_drafts_are_wrong_stops_and_tries_again_later() -> None:
    spec = speculator(Fixed("f", 5))
    with_costs(spec, 0.010, 0.00001)
    row, other = begin(spec), begin(spec)
    verify(spec, row, accepted=0, times=8)
    assert lengths(spec, row) == [0]
    assert lengths(spec, other) != [0]
    assert lengths(spec, row._replace(tokens=[1] * (PROBE_TOKENS + 1))) != [0]


def test_drafts_that_were_not_worth_while_are_tried_again_in_time() -> None:
    spec = speculator(Fixed("f", 5))
    with_costs(spec, 0.010, 0.004)
    verify(spec, begin(spec), accepted=0, times=12)
    row = begin(spec)
    tried = [lengths(spec, row)[0] for _ in range(1000)]
    assert not any(tried[:50]) and tried[-1]


def test_no_sequence_waits_for_drafts_that_would_not_be_verified() -> None:
    spec = speculator(Fixed("a", 5))
    with_costs(spec, 0.02, 0.002)
    row = begin(spec)
    row.drafts.account.without_s = 10.0  # it has been decoding for long, and may spend
    assert spec.waits(row, 1)
    for rate in spec._rates.of(row.drafts.rates, Proposal((7,), "a"), 0):
        rate.observe(100, 0)
    assert lengths(spec, row) == [0]
    waits = [spec.waits(row, 1) for _ in range(2000)]
    assert not any(waits[:100]) and any(waits)  # it tries again in time


@pytest.mark.parametrize(("likely", "pays"), [(0.5, False), (0.9, True)])
def test_beside_others_drafts_have_to_save_the_step_that_a_wait_costs(
    likely: float, pays: bool
) -> None:
    spec = speculator(Fixed("a", 5, likely))
    for rows in (1, 2):
        with_costs(spec, 0.02, 0.002, rows)
    row = begin(spec)
    row.drafts.account.without_s = 10.0  # it has been decoding for long, and may spend
    assert spec.waits(row, 1)
    assert spec.waits(row, 2) == pays


def test_many_sequences_try_again_no_sooner_than_one() -> None:
    waited = []
    for num_rows in (1, 8):
        spec = speculator(Fixed("f", 1), largest_batch=16)
        with_costs(spec, 0.010, 0.004 / num_rows, num_rows)
        verify(spec, begin(spec), accepted=0, times=12)
        rows = [begin(spec) for _ in range(num_rows)]
        waited.append(next(step for step in range(1000) if any(lengths(spec, *rows))))
    assert waited[0] > 20 and waited[1] > waited[0] / 2


def test_what_is_accepted_of_other_sequences_counts_for_new_ones() -> None:
    spec = speculator(Fixed("f", 5))
    with_costs(spec, 0.030, 0.001)
    before = lengths(spec, begin(spec))
    verify(spec, begin(spec), accepted=5, times=12)
    assert lengths(spec, begin(spec)) == [5] > before


def test_tokens_of_one_draft_have_rates_by_their_kinds() -> None:
    spec = speculator(Fixed("f", 5))
    row, proposal = begin(spec), Proposal((7,) * 4, "f", (1, 2, 2, 3), (0.0, 0.5, 0.5, 0.5))
    for accepted in (1, 1, 3, 3) * 5:  # the first always, the second half of the time, then all
        spec.verified(row, proposal, accepted)
    rates = spec.stats().rates
    assert rates["f/1"] > 0.8 and 0.5 < rates["f/2"] < 0.8 and rates["f/3"] < 0.2


def test_the_source_that_is_right_more_often_is_chosen() -> None:
    spec = speculator(Fixed("bad", 5), Fixed("good", 5, likely=0.6))
    with_costs(spec, 0.010, 0.0001)
    for chosen in ("good", "bad"):
        row = begin(spec)
        (proposal,) = spec.choose(1, [row])
        assert proposal is not None and proposal.source == chosen
        for _ in range(6):
            spec.verified(row, proposal, 0)


@pytest.mark.parametrize(("token_s", "expected"), [(0.0, 5), (0.002, 2), (0.1, 0)])
def test_drafts_are_verified_only_where_they_pay(token_s: float, expected: int) -> None:
    costs = BatchCosts()
    for drafted in range(6):
        costs.observe(1, drafted, 0.010 + token_s * (1 + drafted))
    (found,) = costs.best_lengths(1, [[0.6, 0.36, 0.216, 0.13, 0.078]])
    assert found == expected


def test_of_several_sequences_the_likeliest_drafts_come_first() -> None:
    costs = BatchCosts()
    for drafted in range(11):
        costs.observe(2, drafted, 0.014 + 0.002 * drafted)
    first, second = costs.best_lengths(2, [[0.9, 0.81, 0.73], [0.2, 0.04, 0.01]])
    assert (first, second) == (3, 0)


def test_costs_follow_what_is_measured_and_forget_outliers() -> None:
    costs = StepCosts()
    observe(costs, 200, (1, 0.010), (5, 0.030))
    assert costs.predict_s(3) == pytest.approx(0.020, rel=0.05)
    costs.observe(1, 1.0)  # something else had the processor
    observe(costs, 9, (1, 0.010))
    assert costs.predict_s(1) < 0.013
    observe(costs, 90, (1, 0.020))  # the context has grown
    assert costs.predict_s(1) == pytest.approx(0.020, rel=0.05)


def test_a_size_that_was_slow_by_chance_is_tried_again_in_time() -> None:
    costs = BatchCosts()
    costs.remember({1: {0: 0.010, 1: 0.011, 5: 1.0}})
    gains = [[0.9**number for number in range(1, 6)]]
    assert costs.best_lengths(1, gains) == [1]
    for _ in range(500):
        costs.observe(1, 0, 0.010)
        costs.observe(1, 1, 0.011)
    assert costs.best_lengths(1, gains) == [5]


@pytest.mark.parametrize("rows", [1, 8])
def test_a_first_step_with_drafts_that_is_delayed_keeps_no_other_from_drafts(rows: int) -> None:
    costs = BatchCosts()
    for drafted, seconds in ((0, 0.050), (0, 0.050), (0, 0.050), (rows, 1.0), (rows, 0.060)):
        costs.observe(rows, drafted, seconds)
    assert costs.excess_s(rows, rows) < 0.050
    assert costs.best_lengths(rows, [[0.9]] * rows) == [1] * rows


def test_a_first_step_with_drafts_has_one_for_each_sequence() -> None:
    """Of eight sequences, one draft alone may not pay where eight do."""
    costs = BatchCosts()
    costs.observe(8, 0, 0.050)
    assert costs.best_lengths(8, [[0.8, 0.64]] * 8) == [1] * 8


def test_drafts_that_were_measured_on_a_slower_machine_are_tried_again() -> None:
    costs = BatchCosts()
    for drafted, seconds in ((0, 0.080), (0, 0.080), (0, 0.080), (4, 0.126), (0, 0.050)):
        for _ in range(1 if drafted else 20):
            costs.observe(8, drafted, seconds)
    assert costs.plain_s(8) == pytest.approx(0.050, rel=0.2)
    assert costs.best_lengths(8, [[0.9]] * 8) == [1] * 8


def test_drafts_are_not_blamed_for_a_machine_that_becomes_slower() -> None:
    costs = BatchCosts()
    for _ in range(20):
        costs.observe(8, 0, 0.058)
    for _ in range(4):
        costs.observe(8, 8, 0.062)
        assert not costs.needs_plain(8)
    for number in range(4):
        costs.observe(8, 8, 0.100)
        assert costs.needs_plain(8) is (number < 2)  # measured again, as long as it is a surprise
        if costs.needs_plain(8):
            costs.observe(8, 0, 0.094)
    assert costs.plain_s(8) == pytest.approx(0.094)
    assert costs.measured_excess_s(8, 8, 0.100) < 0.010


def test_drafts_cost_each_sequence_its_share_if_all_have_some() -> None:
    """One draft may cost as much as eight: of eight sequences, each pays for its own."""
    costs = BatchCosts()
    costs.remember({8: {0: 0.060, 1: 0.070, 8: 0.072}})
    assert costs.affordable(8, 1, 0.015) == 1
    assert costs.affordable(8, 1, 0.010) == 0


def test_no_step_takes_longer_than_one_with_more_drafts() -> None:
    """A draft that was measured while something else ran does not keep others from drafting."""
    costs = BatchCosts()
    costs.remember({8: {0: 0.077, 1: 0.095, 4: 0.080, 8: 0.082}})
    for _ in range(4):
        for drafted, seconds in ((0, 0.077), (4, 0.080), (8, 0.082)):
            costs.observe(8, drafted, seconds)
    assert costs.excess_s(8, 1) < 0.006


def test_a_step_with_drafts_takes_no_less_than_one_without() -> None:
    costs = BatchCosts()
    for _ in range(3):
        costs.observe(1, 0, 0.200)  # something else had the processor
    for _ in range(20):
        costs.observe(1, 1, 0.060)
    assert costs.plain_s(1) < 0.080
    assert costs.measured_excess_s(1, 1, 0.100) > 0


def test_one_slow_step_says_less_than_steps_of_other_sizes() -> None:
    costs = StepCosts()
    observe(costs, 20, *((tokens, 0.010 + 0.001 * tokens) for tokens in (4, 8, 12, 20, 24)))
    costs.observe(16, 0.120)
    assert costs.predict_s(16) < 0.050
    observe(costs, 60, (16, 0.030))  # that is what it takes, on this device
    assert costs.predict_s(16) == pytest.approx(0.030, rel=0.05)


def test_figures_tell_what_was_drafted_and_saved() -> None:
    spec = speculator(Fixed("f", 5))
    row = begin(spec)
    spec.observe_step(1, 0, 0.010)
    spec.observe_step(1, 5, 0.015)
    verify(spec, row, accepted=3)
    spec.observe_step(1, 5, None)  # with chunks: what the drafts cost is not known
    verify(spec, row, accepted=1)
    stats = spec.stats()
    figures = stats.sources["f"]
    assert (figures.proposals, figures.drafted, figures.accepted) == (2, 10, 4)
    assert figures.saved_s == pytest.approx(4 * 0.010 - 0.015)
    assert set(stats.step_s) == {"1", "6"}
    assert (row.drafts.accepted, row.drafts.rejected) == (0, 0)  # the request has no prediction


def test_time_is_saved_by_the_sources_whose_drafts_were_accepted() -> None:
    spec = speculator(Fixed("f", 5))
    rows = [begin(spec), begin(spec)]
    spec.observe_step(2, 0, 0.010)
    spec.observe_step(2, 6, 0.016)
    for row, source, accepted in zip(rows, ("good", "bad"), (3, 0), strict=True):
        spec.verified(row, Proposal((7,) * 3, source), accepted)
    sources = spec.stats().sources
    assert sources["good"].saved_s == pytest.approx(3 * 0.005 - 0.003)
    assert sources["bad"].saved_s == pytest.approx(-0.003)


def test_a_draft_does_not_pay_for_a_step_that_was_slow_by_chance() -> None:
    spec = speculator(Fixed("f", 5))
    for _ in range(8):
        spec.observe_step(8, 0, 0.100)
        spec.observe_step(8, 1, 0.105)
    row = begin(spec)
    spec.observe_step(8, 1, 0.140, [row.drafts])
    spec.verified(row, Proposal((5,), "f"), 0)
    assert -0.15 < row.drafts.account_of("f").balance_s < -0.03, (
        "8 rows wait for 5 ms, or a bit more"
    )


def test_tokens_of_a_prediction_count_whoever_drafted_them() -> None:
    spec = speculator(PredictionSource([7, 7, 7, 8, 8], 1), Fixed("f", 5, likely=0.9), adapts=False)
    row = begin(spec)
    (proposal,) = spec.choose(1, [row])
    assert proposal is not None and proposal.source == "f"
    spec.verified(row, proposal, 2)
    assert (row.drafts.accepted, row.drafts.rejected) == (2, 1)


def test_a_source_that_is_asked_while_it_is_silent_is_not_charged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One of a grammar has no name: it has to say what is possible of the drafts of others."""
    clock = itertools.count()
    monkeypatch.setattr("engine.speculation.speculator.thread_time", lambda: float(next(clock)))
    spec = speculator(Fixed("grammar", 3))
    with_costs(spec, 1.0, 0.01)
    row = begin(spec)
    account = row.drafts.account_of("grammar")
    account.begin_silence(len(row.tokens))
    assert spec.propose(row) is None and account.balance_s == 0.0
    account.silent_until = 0
    spec.propose(row)
    assert account.balance_s < 0.0
