"""Labels of options: texts that are exactly one token where an answer begins.

The probability of an option's own text would depend on how many tokens it has.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from typing import NamedTuple

LETTERS = (*string.ascii_uppercase, *string.ascii_lowercase)
_YES_NO = (("Yes", "No"), ("yes", "no"))


class Label(NamedTuple):
    text: str
    token_id: int


class Labels(NamedTuple):
    """The labels of one model, for prompts with the same ending."""

    letters: tuple[Label, ...]
    digits: tuple[Label, ...]
    """0, 1 and so on, up to the first that has no token of its own."""
    yes_no: tuple[Label, ...]
    """The labels of true and false; empty if these words are not one token each."""

    def for_levels(self, count: int) -> tuple[Label, ...]:
        """Return the labels of a scale: digits if there are enough."""
        return self.digits if count <= len(self.digits) else self.letters


def find_labels(encode: Callable[[str], list[int]], ending: str, after_space: bool) -> Labels:
    """Return the labels after prompts that end with ``ending``, tokenized by ``encode``.
    ``after_space``: a word there usually has a space before it."""
    before = encode(ending)

    def tokens(texts: Sequence[str]) -> tuple[Label, ...]:
        best: tuple[Label, ...] = ()
        for space in (" ", "") if after_space else ("", " "):
            found: dict[int, Label] = {}
            for text in texts:
                ids = encode(ending + space + text)
                if len(ids) == len(before) + 1 and ids[:-1] == before:
                    found.setdefault(ids[-1], Label(text, ids[-1]))
            if len(found) > len(best):
                best = tuple(found.values())
        return best

    digits = tokens(string.digits)
    unbroken = [label for number, label in enumerate(digits) if label.text == str(number)]
    pairs = (tokens(pair) for pair in _YES_NO)
    yes_no: tuple[Label, ...] = next((pair for pair in pairs if len(pair) == 2), ())
    return Labels(tokens(LETTERS), tuple(unbroken), yes_no)
