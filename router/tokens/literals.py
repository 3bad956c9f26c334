"""Regular expressions that match any of many fixed texts."""

from __future__ import annotations

import re
from collections.abc import Iterable


def literal_pattern(texts: Iterable[str]) -> re.Pattern[str] | None:
    """Return a pattern that matches any of ``texts``, preferring the longest; None if there are
    none.

    The pattern is a tree of their characters. With an alternative for each of a few thousand
    control tokens, text that repeats their first characters would take seconds, during which no
    other thread runs.
    """
    tree: _Tree = {}
    for text in filter(None, texts):
        branch = tree
        for char in text:
            branch = branch.setdefault(char, {})
        branch[""] = {}
    return re.compile(_source(tree)) if tree else None


_Tree = dict[str, "_Tree"]
"""The possible next nodes by character; an empty character marks the end of a text."""


def _source(tree: _Tree) -> str:
    branches = []
    for char, below in tree.items():
        text = char
        while char and len(below) == 1 and "" not in below:
            char, below = next(iter(below.items()))
            text += char
        if char:
            branches.append(re.escape(text) + _source(below))
    if not branches:
        return ""
    return f"(?:{'|'.join(branches)})" + ("?" if "" in tree else "")
