"""Prompts that no cache has seen: random words, by seed."""

from __future__ import annotations

import random

from services.measuring.workloads import words as words_of


def text(seed: int, words: int) -> str:
    """Return a prompt of about one token per word."""
    return words_of(random.Random(seed), words)


def ids(seed: int, tokens: int, vocab_size: int = 40_000) -> list[int]:
    """Return exactly ``tokens`` random token ids, none of them special."""
    rng = random.Random(seed)
    return [rng.randrange(1000, vocab_size) for _ in range(tokens)]
