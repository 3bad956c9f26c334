"""Drafts never cost a request more than a little, whatever sources claim and steps take."""

from __future__ import annotations

from typing import Any

import pytest

from engine.speculation.accounts import FIRST_SILENCE, SequenceAccount, SourceAccount
from engine.speculation.batch_costs import BatchCosts
from tests.engine.speculation.simulated import PLAIN_S, Device, Processor, noisy

DRAFTS = (0.0, 0.02, 0.1, 0.3, 1.0)
"""What a draft adds to a step, in steps."""


def always(number: int) -> bool:
    return True


def never(number: int) -> bool:
    return False


@pytest.mark.parametrize("draft", DRAFTS)
def test_a_source_that_is_always_wrong_costs_next_to_nothing(draft: float) -> None:
    for tokens, most in ((64, 0.02), (256, 0.01)):
        (row,) = Processor(draft).run(never, tokens=tokens)  # nothing is known at first
        assert row.lost <= most and row.most_lost <= 1


@pytest.mark.parametrize(("draft", "gain"), [(0.0, 8), (0.02, 6), (0.1, 3), (0.3, 1.8)])
def test_a_source_that_is_always_right_is_believed_soon(draft: float, gain: float) -> None:
    processor = Processor(draft)
    (first,) = processor.run(always, tokens=256)
    (second,) = processor.run(always, tokens=256)
    assert first.gain > 0.8 * gain and second.gain > gain and first.most_lost < 1


def test_a_first_draft_that_is_wrong_is_not_the_last() -> None:
    processor = Processor(0.05)
    processor.run(always, tokens=64)  # thus the first draft of the next one is long
    (row,) = processor.run(lambda number: number >= 4, tokens=24)
    assert row.gain > 1.3


@pytest.mark.parametrize(
    ("num_rows", "draft", "gain"), [(1, 0.05, 4), (4, 0.05, 2.4), (8, 0.05, 1.6)]
)
def test_guesses_that_were_not_verified_show_that_a_source_is_right_now(
    num_rows: int, draft: float, gain: float
) -> None:
    processor = Processor(draft)
    processor.run(*[always] * num_rows, tokens=32)
    rows = processor.run(*[lambda number: number >= 10] * num_rows, tokens=128)
    assert all(row.gain > gain and row.most_lost < 0.5 for row in rows)


@pytest.mark.parametrize(
    ("num_rows", "alone", "draft", "gain"),
    [(1, 0.2, 0.02, 5), (1, 0.5, 0.06, 3), (4, 0.2, 0.02, 2), (4, 0.2, 0.06, 1.6)],
)
def test_right_guesses_pay_for_drafts_that_let_a_device_wait(
    num_rows: int, alone: float, draft: float, gain: float
) -> None:
    """The first ones cost more than a source may lose, whatever their number."""
    tokens = 256 if num_rows == 1 else 128
    device = Device(draft, alone=alone)
    for _ in range(2):  # at first, no cost is known
        device.run(*[lambda number: number >= 10] * num_rows, tokens=tokens)
    assert tokens * PLAIN_S / device.total_s > gain


@pytest.mark.parametrize("num_rows", [1, 4])
@pytest.mark.parametrize("alone", [0.0, 0.2, 0.5])
@pytest.mark.parametrize("draft", [0.02, 0.06])
def test_what_drafts_may_cost_is_limited_on_a_device_too(
    num_rows: int, alone: float, draft: float
) -> None:
    def often(number: int) -> bool:
        return number % 4 != 0

    def now_and_then(number: int) -> bool:
        return number // 8 % 2 == 1

    device = Device(draft, alone=alone)
    for is_right in (never, always, often, now_and_then, never):
        rows = device.run(*[is_right] * num_rows, tokens=128)
        assert all(row.most_lost < 1.1 for row in rows)
    assert all(row.lost <= 0.015 for row in rows)


@pytest.mark.parametrize("draft", DRAFTS)
def test_a_source_that_turns_wrong_is_left_soon(draft: float) -> None:
    (row,) = Processor(draft).run(lambda number: number < 300, tokens=300)
    saved_s = -row.lost_s
    (row,) = Processor(draft).run(lambda number: number < 300, tokens=600)
    assert saved_s + row.lost_s < 8 * PLAIN_S  # of what it had saved
    assert row.lost < 0.01


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("spread", [0.1, 0.4])
def test_noise_changes_none_of_that_by_much(seed: int, spread: float) -> None:
    for draft in (0.02, 0.1, 0.3):
        (row,) = Processor(draft, noisy(seed, spread, 0.01)).run(never, tokens=256)
        assert row.lost <= 0.02 and row.most_lost <= 1
    (row,) = Processor(0.02, noisy(seed, spread, 0.01)).run(always, tokens=256)
    assert row.gain > 2.5


@pytest.mark.parametrize("draft", [*DRAFTS[:-1], *(each / 4 for each in DRAFTS[1:])])
def test_no_request_pays_for_the_drafts_of_others(draft: float) -> None:
    """A draft adds a row to four, so a fourth of a step is as much as it can take."""
    rows = Processor(draft).run(always, never, always, never, tokens=128)
    # Those that are never right pay for drafts of their own too.
    assert all(row.most_lost <= 1.1 for row in rows)


def test_requests_that_are_behind_by_turns_gain_together() -> None:
    turns = [lambda number, first=20 * i: (number + first) % 80 < 60 for i in range(4)]
    rows = Processor(0.03).run(*turns, tokens=240)
    assert all(row.gain > 1.2 for row in rows)


@pytest.mark.parametrize("num_rows", [4, 8, 16])
def test_requests_gain_together(num_rows: int) -> None:
    rows = Processor(0.1 / num_rows).run(*[always] * num_rows, tokens=128)
    assert all(row.gain > 2 for row in rows)


def test_what_is_right_by_turns_is_drafted_while_it_is_right() -> None:
    (row,) = Processor(0.05).run(lambda number: number % 100 < 80, tokens=1000)
    assert row.gain > 2 and row.most_lost <= 1


def test_a_source_is_silent_for_longer_each_time_until_it_saves_something() -> None:
    account = SourceAccount()
    for times in (1, 2, 4):
        account.begin_silence(100)
        assert account.is_silent(100 + times * FIRST_SILENCE - 1)
        assert not account.is_silent(100 + times * FIRST_SILENCE)
    account.verified(0.01, 0.03, PLAIN_S)
    account.begin_silence(100)
    assert not account.is_silent(100 + FIRST_SILENCE)


def test_right_guesses_give_back_a_part_of_what_was_lost() -> None:
    source, sequence = SourceAccount(), SequenceAccount()
    source.spend(0.25 * PLAIN_S)
    source.begin_silence(100)
    source.guessed(0, PLAIN_S, 0.0)
    assert source.is_silent(101) and source.balance_s == -0.25 * PLAIN_S
    source.guessed(2, PLAIN_S, 0.0)
    assert not source.is_silent(101) and source.balance_s == pytest.approx(-0.05 * PLAIN_S)
    source.guessed(2, PLAIN_S, 0.0)
    assert source.balance_s == pytest.approx(0.0)
    room_s = sequence.room_s(PLAIN_S)
    sequence.guessed(2, PLAIN_S)
    assert sequence.room_s(PLAIN_S) - room_s == pytest.approx(0.2 * PLAIN_S)
    sequence.guessed(100, PLAIN_S)
    assert sequence.room_s(PLAIN_S) < 2 * PLAIN_S, "what a request may lose at most"


def test_what_was_saved_pays_for_little_of_what_is_lost_later() -> None:
    account = SourceAccount()
    account.verified(0.0, 100 * PLAIN_S, PLAIN_S)
    assert account.room_s(PLAIN_S, 0.0) < 4 * PLAIN_S


def test_a_request_may_lose_little_of_what_it_has_computed() -> None:
    account = SequenceAccount()
    assert account.room_s(PLAIN_S) == pytest.approx(0.5 * PLAIN_S)
    for _ in range(30):
        account.step(PLAIN_S, PLAIN_S / 40)
    assert account.room_s(PLAIN_S) == pytest.approx(0.25 * PLAIN_S)
    for _ in range(970):
        account.step(PLAIN_S, 0.0)
    assert account.room_s(PLAIN_S) == pytest.approx(14.25 * PLAIN_S)
    account.save(10, PLAIN_S)
    assert account.room_s(PLAIN_S) == pytest.approx(24.4 * PLAIN_S)


@pytest.mark.parametrize("gain", [0.01, 0.9])
def test_drafts_that_pay_for_nobody_are_looked_at_once_however_many_requests(gain: float) -> None:
    costs, calls = BatchCosts(), [0]
    for drafted in (0, 0, 0, 1, 2, 4):
        costs.observe(64, drafted, PLAIN_S * (1 + 0.005 * drafted))
    best_lengths = costs.best_lengths

    def counted(*args: Any) -> list[int]:
        calls[0] += 1
        return best_lengths(*args)

    costs.best_lengths = counted  # type: ignore[method-assign, assignment]
    found = costs.shared_lengths(64, [[gain]] * 64, [PLAIN_S] * 64)
    assert any(found) == (gain > 0.5) and calls[0] <= 2
