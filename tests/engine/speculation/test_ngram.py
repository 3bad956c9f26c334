"""The index of n-grams against a search through all tokens."""

from __future__ import annotations

import random
import time

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.speculation.ngram import MAX_AT_ONCE, ONCE, OTHER, SAME, NgramIndex, NgramSource
from engine.speculation.source import MAX_SOURCE_BYTES


def searched(tokens: list[int], smallest: int, largest: int) -> tuple[int, int] | None:
    """Return the index after the last earlier occurrence of the longest n-gram at the end, and what
    followed the last two."""
    for size in range(min(largest, len(tokens) - 1), smallest - 1, -1):
        ends = [
            end for end in range(size, len(tokens)) if tokens[end - size : end] == tokens[-size:]
        ]
        if ends:
            same = len({tokens[end] for end in ends[-2:]}) == 1
            return ends[-1], ONCE if len(ends) == 1 else SAME if same else OTHER
    return None


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    smallest=st.integers(1, 3),
    more=st.integers(0, 3),
    lengths=st.lists(st.sampled_from([1, 1, 1, 2, 5, 17, 40]), max_size=20),
    seed=st.integers(0, 2**32),
)
def test_it_finds_where_the_longest_ngram_occurred_last(
    smallest: int, more: int, lengths: list[int], seed: int
) -> None:
    pick = random.Random(seed)
    index = NgramIndex(smallest, smallest + more, 4096)
    tokens: list[int] = []
    for length in lengths:
        new = [pick.randrange(5) for _ in range(length)]
        tokens += new
        index.extend(new)
        found = index.find(index.tokens)
        expected = searched(tokens, smallest, smallest + more)
        assert ((found.after, found.followed) if found else None) == expected


def test_what_follows_repeats_itself_beyond_the_end() -> None:
    source = NgramSource(1, 4, first=0, expected_tokens=100)
    proposal = source.propose([7, 1, 2, 3, 1, 2, 3], 8)
    assert proposal is not None and proposal.tokens == (1, 2, 3, 1, 2, 3, 1, 2)
    assert proposal.kinds == (3, 4, 5, 6, 7, 8, 9, 10)  # tokens that match, drafts included


def test_a_long_prompt_is_entered_in_several_calls_before_anything_is_proposed() -> None:
    tokens = [*range(2 * MAX_AT_ONCE), 5, 6]
    source = NgramSource(1, 4, first=0, expected_tokens=10_000)
    assert source.propose(tokens, 2) is None
    assert source.propose(tokens, 2) is None
    proposal = source.propose(tokens, 2)
    assert proposal is not None and proposal.tokens == (7, 8)


def test_the_prompt_is_left_out_if_that_is_asked_for() -> None:
    prompt = [1, 2, 3, 4, 5]
    source = NgramSource(1, 4, first=len(prompt), expected_tokens=100)
    assert source.propose([*prompt, 2], 4) is None
    assert source.propose([*prompt, 2, 9], 4) is None
    proposal = source.propose([*prompt, 2, 9, 2], 4)
    assert proposal is not None and proposal.tokens == (9, 2, 9, 2)


def test_a_long_text_takes_bounded_memory_and_little_time() -> None:
    pick = random.Random(3)
    tokens = [pick.randrange(3000) for _ in range(32_000)]
    source = NgramSource(1, 4, first=0, expected_tokens=10**9)
    assert source.nbytes <= MAX_SOURCE_BYTES
    text = tokens[:20_000]
    source.propose(text, 5)  # NumPy enters a prompt
    began = time.thread_time()
    for token in tokens[20_000:]:
        text.append(token)
        source.propose(text, 5)
    # 8 microseconds of CPU were measured; the bound finds what grows with the length.
    assert (time.thread_time() - began) / 12_000 < 200e-6
