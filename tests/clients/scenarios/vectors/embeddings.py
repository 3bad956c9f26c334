"""What scenarios of clients for embeddings and rankings need."""

import math
import os
from collections.abc import Sequence

from harness import check

EMBEDDER = os.environ["CLIENT_EMBEDDER"]
RANKER = os.environ["CLIENT_RANKER"]
TEXTS = ["this is of the kind", "that was for them", "a text " * 40]
DIMENSIONS = 64


def check_vectors(vectors: Sequence[Sequence[float]], count: int) -> None:
    """Check that there are ``count`` different vectors, each with the length 1."""
    check(len(vectors) == count, f"{len(vectors)} vectors")
    for vector in vectors:
        check(len(vector) == DIMENSIONS, f"{len(vector)} numbers")
        check(math.isclose(math.hypot(*vector), 1, abs_tol=1e-4), "its length is not 1")
    check(len({tuple(vector) for vector in vectors}) == count, "they are the same")


def check_same(one: Sequence[float], other: Sequence[float]) -> None:
    check(max(abs(a - b) for a, b in zip(one, other, strict=True)) < 1e-6, "another vector")


def check_ranking(scores: Sequence[float], numbers: Sequence[int], count: int) -> None:
    """Check that scores fall, and that each document is there once."""
    check(list(scores) == sorted(scores, reverse=True), scores)
    check(all(0 < score < 1 for score in scores), scores)
    check(sorted(numbers) == list(range(count)), numbers)
