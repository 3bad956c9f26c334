"""Log-probabilities of many positions in one message."""

from __future__ import annotations

import gc

import msgspec
import pytest

from shared.wire import (
    Delta,
    PackedLogprobs,
    TokenLogprobs,
    Tokens,
    ToRouter,
    WireError,
    decode,
    encode,
)
from tests.packed_logprobs import packed

SCORES = [
    TokenLogprobs(chosen=-0.5 * n, top_ids=(n, 2**31 - 1), top=(-0.25, float("-inf")))
    for n in range(5)
]


def sent(logprobs: PackedLogprobs) -> PackedLogprobs:
    """Return what the router gets."""
    delta = Delta(request_id="a", attempt=0, index=0, token_ids=[], prompt_logprobs=logprobs)
    message, _ = decode([bytes(frame) for frame in encode(Tokens(deltas=[delta]))], ToRouter)
    found: PackedLogprobs = message.deltas[0].prompt_logprobs
    return found


WITHOUT_ALTERNATIVES = [TokenLogprobs(chosen=-float(n)) for n in range(3)]


@pytest.mark.parametrize("scores", [[], SCORES[:1], SCORES, WITHOUT_ALTERNATIVES], ids=len)
def test_they_arrive_as_they_were(scores: list[TokenLogprobs]) -> None:
    found = sent(packed(scores))
    assert len(found) == len(scores)
    assert list(found) == scores
    assert list(found.after(2)) == scores[2:]


@pytest.mark.parametrize(
    "lengths", [(3, 0, 0), (0, 4, 4), (8, 4, 4), (8, 8, 16), (8, 6, 6)], ids=str
)
def test_arrays_that_do_not_match_are_refused(lengths: tuple[int, int, int]) -> None:
    parts = dict(zip(("chosen", "top_ids", "top"), map(bytes, lengths), strict=True))
    delta = {"request_id": "a", "attempt": 0, "index": 0, "token_ids": [], "prompt_logprobs": parts}
    with pytest.raises(WireError, match="do not match"):
        decode([msgspec.msgpack.encode({"type": "tokens", "deltas": [delta]})], ToRouter)


def test_the_garbage_collector_passes_over_them() -> None:
    assert not any(gc.is_tracked(score) for score in packed(SCORES))
