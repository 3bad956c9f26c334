"""Drafts from n-grams: the tokens that followed an earlier occurrence of the last tokens.

The idea is that of prompt lookup decoding (Saxena 2023), and of LZ77 (Ziv and Lempel 1977)."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from engine.speculation.source import MAX_SOURCE_BYTES, DraftSource, Proposal

LONGEST_KIND = 12
"""Longer matches count as this length."""
TOLD_APART = 3
"""Longest match for which the continuations of the last two occurrences are compared."""
ONCE, SAME, OTHER = 0, 20, 40
"""The continuations of a match: it occurred only once, both times the same, or different. The
sum with the match length is the kind of a token: 3 comes after a match of three tokens, 43 after
one whose last two continuations differ. Later tokens of a draft count as if they followed a
match that is longer by the tokens before them."""
_LIKELY = (0.3, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.9, 0.9, 0.95, 0.95)
_LIKELY_AT = {ONCE: _LIKELY, SAME: (0.5, 0.7, 0.8), OTHER: (0.15, 0.2, 0.4)}
LIKELY = tuple(
    dict(enumerate(_LIKELY_AT[kind // 20 * 20], 1)).get(kind % 20, 0.0)
    for kind in range(OTHER + TOLD_APART + 1)
)
"""Assumed acceptance rate of each kind."""
FEW_TOKENS = 16
"""Above this number of new tokens, NumPy adds them."""
MAX_AT_ONCE = 2_048
"""Tokens of a long prompt are added in several calls of less than a millisecond each, before
anything is proposed."""
MIN_BITS = 8

_FOLLOWED = (ONCE, SAME, OTHER)
_FACTOR = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


class Match(NamedTuple):
    after: int  # index of the token after it
    length: int  # at most `LONGEST_KIND`
    followed: int  # `ONCE`, `SAME` or `OTHER`


class NgramIndex:
    """An append-only list of tokens, and the last occurrence of each n-gram in it.

    There is one table of fixed size per n, without collision lists: an n-gram may overwrite
    another, which is then not found. The cost of a token is therefore proportional to the number
    of n-gram sizes, and the tables never take more than `MAX_SOURCE_BYTES` together."""

    def __init__(self, smallest: int, largest: int, expected_tokens: int) -> None:
        """N-grams have ``smallest`` (at least 1) to ``largest`` tokens."""
        self.tokens = array("i")
        self._entered = 0  # n-grams that end before this index are in the tables
        self._sizes = range(smallest, largest + 1)
        max_bits = (MAX_SOURCE_BYTES // 4 // len(self._sizes)).bit_length() - 1
        bits = min(max(MIN_BITS, (2 * expected_tokens).bit_length()), max_bits)
        self._shift = 64 - bits
        self._arrays: list[Any] = [np.zeros(2**bits, np.int32) for _ in self._sizes]
        """By size, for each n-gram: 4 times the index after it, plus 0, 1 or 2 for its last two
        continuations (`_FOLLOWED`); 0 if unknown."""
        self._tables = [memoryview(table) for table in self._arrays]  # faster for single values
        self._last_places: list[int] = []  # n-grams at the end that are not added yet

    @property
    def nbytes(self) -> int:
        """The size of the tables in bytes."""
        return sum(table.nbytes for table in self._arrays)

    def extend(self, tokens: Sequence[int]) -> None:
        """Add ``tokens``. The n-grams that end with the last token are added once another token
        follows."""
        if len(tokens) > FEW_TOKENS or not self.tokens:
            self.tokens.extend(tokens)
            self._enter(len(self.tokens) - 1)
            self._last_places = self._places(self.tokens)
            return
        for token in tokens:
            known = self.tokens
            end = self._entered = len(known)
            for table, place in zip(self._tables, self._last_places, strict=False):
                old = table[place]
                table[place] = 4 * end + (old and 2 - (known[old >> 2] == token))
            known.append(token)
            self._last_places = self._places(self.tokens)

    def find(self, context: Sequence[int]) -> Match | None:
        """Return where the longest n-gram that ends ``context`` last occurred."""
        places = self._last_places if context is self.tokens else self._places(context)
        for number in range(len(places) - 1, -1, -1):
            if found := self._tables[number][places[number]]:
                length = self.match(found >> 2, context)
                if length >= self._sizes[number]:
                    return Match(found >> 2, length, _FOLLOWED[found & 3])
        return None

    def following(self, index: int, count: int) -> list[int]:
        """Return ``count`` tokens from ``index`` on. Beyond the end, the text from ``index`` is
        repeated."""
        found = self.tokens[index : index + count].tolist()
        period = len(self.tokens) - index
        while period and len(found) < count:
            found.append(found[len(found) - period])
        return found

    def _places(self, tokens: Sequence[int]) -> list[int]:
        """Return the table places of the n-grams at the end of ``tokens``, one per size, as far
        as there are enough tokens."""
        mixed, shift, smallest = 0, self._shift, self._sizes.start
        found = []
        for size in range(1, min(self._sizes.stop, len(tokens) + 1)):
            mixed = (mixed ^ (tokens[-size] + 1)) * _FACTOR & _MASK
            if size >= smallest:
                found.append(mixed >> shift)
        return found

    def _enter(self, end: int) -> None:
        """Add the n-grams that end before index ``end`` and are not added yet."""
        largest = self._sizes.stop - 1
        first = max(0, self._entered - largest + 1)
        given: Any = np.array(self.tokens[first:end], np.uint64) + np.uint64(1)
        mixed: Any = np.zeros(len(given), np.uint64)
        for size in range(1, min(largest, len(given)) + 1):
            # N-grams that end at index first + size - 1 and later.
            mixed = mixed[-(len(given) - size + 1) :] ^ given[: len(given) - size + 1]
            mixed = mixed * np.uint64(_FACTOR)
            if size >= self._sizes.start:
                old = max(0, self._entered - first - size + 1)
                after = np.arange(first + size + old, end + 1)
                table = self._arrays[size - self._sizes.start]
                self._enter_in(table, mixed[old:] >> np.uint64(self._shift), after)
        self._entered = max(self._entered, end)

    def _enter_in(self, table: Any, places: Any, after: Any) -> None:
        """Add n-grams at ``places`` of ``table``, with increasing indices ``after``."""
        # Sorting both as one number is faster than argsort of one of them.
        both = (places.astype(np.int64) << 32) | after
        both.sort()
        places, after = both >> 32, both & 0xFFFFFFFF
        is_last = np.append(places[1:] != places[:-1], True)
        before = np.append(0, after[:-1])
        before[np.append(True, is_last[:-1])] = 0  # the first at its place in this call
        places, after, before = places[is_last], after[is_last], before[is_last]
        before = np.where(before, before, table[places] >> 2)
        tokens = np.frombuffer(self.tokens, np.int32)
        other = tokens[before] != tokens[np.minimum(after, len(tokens) - 1)]
        table[places] = 4 * after + np.where(before, 1 + other, 0)

    def match(self, index: int, context: Sequence[int]) -> int:
        """Return how many tokens before ``index`` equal the last tokens of ``context``."""
        most = min(index, len(context), LONGEST_KIND)
        for length in range(most):
            if self.tokens[index - 1 - length] != context[-1 - length]:
                return length
        return most


class NgramSource(DraftSource):
    """Searches the prompt and the outputs, or only the outputs."""

    NAME = "ngram"

    def __init__(self, smallest: int, largest: int, *, first: int, expected_tokens: int) -> None:
        """Tokens before index ``first`` are not searched. About ``expected_tokens`` come after
        it."""
        self._first = first
        self._index = NgramIndex(smallest, largest, expected_tokens)

    @property
    def nbytes(self) -> int:
        """The size of its tables in bytes."""
        return self._index.nbytes

    def propose(self, tokens: Sequence[int], count: int) -> Proposal | None:
        index = self._index
        begin = self._first + len(index.tokens)
        index.extend(tokens[begin : begin + MAX_AT_ONCE])
        if begin + MAX_AT_ONCE < len(tokens):
            return None
        match = index.find(index.tokens)
        if match is None:
            return None
        drafts = tuple(index.following(match.after, count))
        return Proposal(drafts, self.NAME, kinds_after(match.length, count, match.followed), LIKELY)


@cache
def kinds_after(length: int, count: int, followed: int = ONCE) -> tuple[int, ...]:
    """Return the kinds of ``count`` tokens after a match of ``length`` tokens."""
    first = length + (followed if length <= TOLD_APART else 0)
    return (first, *(min(length + i, LONGEST_KIND) for i in range(1, count)))
