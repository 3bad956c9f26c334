"""Prompts that no cache has seen: random words, by seed."""

from __future__ import annotations

import random

WORDS = """time year people way day man thing woman life child world school state family
student group country problem hand part place case week company system program question work
government number night point home water room mother area money story fact month lot right
study book eye job word business issue side kind head house service friend father power hour
game line end member law car city community name president team minute idea body information
back parent face others level office door health person art war history party result change
morning reason research girl guy moment air teacher force education""".split()


def text(seed: int, words: int) -> str:
    """Return a prompt of about one token per word."""
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) for _ in range(words))


def ids(seed: int, tokens: int, vocab_size: int = 40_000) -> list[int]:
    """Return exactly ``tokens`` random token ids, none of them special."""
    rng = random.Random(seed)
    return [rng.randrange(1000, vocab_size) for _ in range(tokens)]
