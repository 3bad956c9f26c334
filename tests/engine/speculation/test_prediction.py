"""Drafts from a predicted text: the answer follows it, leaves it, and is found again."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from engine.speculation.prediction import PredictionSource

PROMPT = [900, 901]
TEXT = list(range(100))


def source(text: Sequence[int] = TEXT) -> PredictionSource:
    return PredictionSource(text, len(PROMPT))


def drafts(source: PredictionSource, answer: Sequence[int], count: int = 3) -> list[int]:
    proposal = source.propose([*PROMPT, *answer], count)
    return list(proposal.tokens) if proposal else []


def test_the_text_is_proposed_from_its_beginning_to_its_end() -> None:
    followed = source()
    assert drafts(followed, []) == [0, 1, 2]
    assert drafts(followed, [0]) == [1, 2, 3]
    assert drafts(followed, TEXT[:50]) == [50, 51, 52]
    assert drafts(followed, TEXT[:99]) == [99]
    assert drafts(followed, TEXT) == []


@pytest.mark.parametrize(
    ("answer", "goes_on_at"),
    [
        ([*TEXT[:40], 777, *TEXT[41:43]], 43),  # a token was replaced
        ([*TEXT[:40], 777, 778, 779, *TEXT[40:42]], 42),  # some were inserted
        ([*TEXT[:40], *TEXT[45:47]], 47),  # some were left out
        ([*TEXT[:10], *TEXT[80:83]], 83),  # many were
        ([777] * 300 + TEXT[:2], 2),  # something else comes before the text
    ],
)
def test_an_answer_that_leaves_the_text_is_found_again(answer: list[int], goes_on_at: int) -> None:
    at_once, token_by_token = source(), source()
    for length in range(len(answer)):
        drafts(token_by_token, answer[:length])
    for followed in (at_once, token_by_token):
        assert drafts(followed, answer) == TEXT[goes_on_at : goes_on_at + 3]


def test_of_equal_places_the_nearest_counts() -> None:
    lines = [[1, 2, 3, number, 1, 2, 3, number + 1, 5] for number in range(10, 30, 2)]
    text = [token for line in lines for token in line]
    followed = source(text)
    drafts(followed, text[:40])
    assert drafts(followed, [*text[:40], 999, *text[41:43]]) == text[43:46]


def test_a_longer_match_is_another_kind_of_guess() -> None:
    followed = source()
    first = followed.propose(PROMPT, 2)
    later = followed.propose([*PROMPT, *TEXT[:3]], 2)
    much_later = followed.propose([*PROMPT, *TEXT[:60]], 2)
    assert first and later and much_later
    assert (first.kinds, later.kinds, much_later.kinds) == ((0, 1), (3, 4), (12, 12))
    assert later.likely[3] < much_later.likely[12]


def test_an_answer_that_never_repeats_the_text_takes_little_time() -> None:
    followed = source([token % 7 for token in range(32_000)])
    tokens, began = list(PROMPT), time.thread_time()
    for token in range(5_000):
        tokens.append(1_000 + token)
        assert followed.propose(tokens, 5) is None or not token
    assert time.thread_time() - began < 10  # it takes a twentieth of that
