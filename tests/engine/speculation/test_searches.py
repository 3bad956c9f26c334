"""Drafts are looked for less often while there are none."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from engine.speculation.sequence_drafts import DraftRow
from engine.speculation.source import DraftSource, Proposal
from engine.speculation.speculator import SEARCHES, SearchPace, SpeculationOptions, Speculator
from tests.engine.speculation.simulated import PLAIN_S, RIGHT, begin


class Counting(DraftSource):
    """Guesses from a number of tokens on, and counts how often it is asked."""

    def __init__(self, begins: float) -> None:
        self.asked, self._begins = 0, begins

    def propose(self, tokens: Sequence[int], count: int) -> Proposal | None:
        self.asked += 1
        is_known = len(tokens) >= self._begins
        return Proposal((RIGHT,) * count, "counting", likely=(0.9,)) if is_known else None


def asked(source: Counting, steps: int, *, adapts: bool = True, requests: int = 1) -> int:
    """Return how often ``source`` is asked by ``requests`` of so many steps, one after another."""
    options = SpeculationOptions(tokens=16, adapts=adapts)
    speculator = Speculator(options, [lambda request, grammar: source])
    for _ in range(requests):
        drafts, tokens = begin(speculator).drafts, [RIGHT]
        for _ in range(steps):
            row = DraftRow(drafts, tokens, 16)
            (found,) = speculator.choose(1, [row])
            drafted = len(found.tokens) if found else 0
            speculator.observe_step(1, drafted, PLAIN_S, [drafts])
            tokens += [RIGHT] * (drafted + 1)
            if found:
                speculator.verified(row._replace(tokens=tokens), found, drafted)
    return source.asked


def test_what_finds_nothing_is_asked_less_often() -> None:
    assert asked(Counting(float("inf")), 64) < 45
    assert asked(Counting(float("inf")), 400) < 150


def test_a_new_sequence_is_searched_at_each_step() -> None:
    assert asked(Counting(float("inf")), 16, requests=9) > 9 * 15 - 4  # but while costs are unknown


def test_once_something_is_found_there_is_a_search_in_each_step_again() -> None:
    pace = SearchPace(rests=True)
    for _ in range(10 * SEARCHES):
        if not pace.skips_step():
            pace.searched(found=False)
    pace.searched(found=True)
    for _ in range(SEARCHES - 1):
        assert not pace.skips_step()
        pace.searched(found=False)


def test_without_measured_costs_drafts_are_looked_for_at_each_step() -> None:
    assert asked(Counting(float("inf")), 64, adapts=False) == 64


def test_no_search_is_left_out_for_which_a_sequence_may_wait() -> None:
    source = Counting(float("inf"))
    speculator = Speculator(SpeculationOptions(), [lambda request, grammar: source])
    drafts = begin(speculator).drafts
    for _ in range(100):
        speculator.waits(DraftRow(drafts, [RIGHT], 2), 1)
        before = source.asked
        speculator.choose(1, [DraftRow(drafts, [RIGHT], 1)])
        is_known = speculator.costs.plain_s(1) > 0 and not speculator.costs.needs_plain(1)
        speculator.observe_step(1, 0, PLAIN_S, [drafts])
        assert source.asked > before or not is_known


@pytest.mark.parametrize("begins", [100, 201, 302])
def test_drafts_that_begin_late_are_found_a_few_tokens_later(begins: int) -> None:
    options = SpeculationOptions(tokens=16)
    speculator = Speculator(options, [lambda request, grammar: Counting(begins)])
    drafts = begin(speculator).drafts
    for length in range(1, begins + 4):
        row = DraftRow(drafts, [RIGHT] * length, 16)
        (found,) = speculator.choose(1, [row])
        speculator.observe_step(1, 0, PLAIN_S, [drafts])
        if found:
            break
    assert found is not None and length >= begins
