"""Log-probabilities of prompts, as engines send them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from shared.wire import PackedLogprobs, TokenLogprobs


def packed(scores: Sequence[TokenLogprobs]) -> PackedLogprobs:
    """Return ``scores``, whose values fit into 32 bits, as the message that carries them."""
    return PackedLogprobs(
        chosen=array("f", [one.chosen for one in scores]).tobytes(),
        top_ids=array("i", [each for one in scores for each in one.top_ids]).tobytes(),
        top=array("f", [each for one in scores for each in one.top]).tobytes(),
    )
