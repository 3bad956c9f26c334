"""Pictures in the prompts of `FakeExecutor`: what their positions have instead of tokens.

A position of a picture has a mark, which names the picture and the place in it. So embeddings of
another picture or place give other texts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from engine.plan import Chunk
from shared import wire
from shared.hashing import Picture

IMAGE = 5_000
"""The token of all positions of pictures."""
DIGESTS = [bytes([number]) * wire.DIGEST_BYTES for number in range(4)]
LENGTHS = [1, 3, 6, 13]
"""The positions of the picture of each digest."""
_FIRST_MARK, _STEP = 10_000, 100


class Shown(NamedTuple):
    """A picture among the tokens of a prompt."""

    number: int


def flattened(items: Sequence[int | Shown]) -> tuple[list[int], tuple[wire.ImagePart, ...]]:
    """Return the tokens of a prompt and its pictures."""
    tokens: list[int] = []
    parts: list[wire.ImagePart] = []
    sent: set[int] = set()
    for item in items:
        if isinstance(item, int):
            tokens.append(item)
            continue
        number, length = item.number, LENGTHS[item.number]
        spec = wire.ArraySpec(name="pixel_values", dtype="uint8", shape=(length,))
        arrays = () if number in sent else (spec,)
        sent.add(number)
        parts.append(
            wire.ImagePart(digest=DIGESTS[number], start=len(tokens), length=length, arrays=arrays)
        )
        tokens += [IMAGE] * length
    if items and not isinstance(items[-1], int):
        tokens.append(1)  # something follows the last picture
    return tokens, tuple(parts)


def items_of(request: wire.Submit) -> list[int | Shown]:
    """Return what `flattened` made the prompt of."""
    found: list[int | Shown] = []
    at = 0
    for one in request.images:
        found += request.token_ids[at : one.start]
        found.append(Shown(DIGESTS.index(one.digest)))
        at = one.start + one.length
    return found + list(request.token_ids[at:])


def marked_prompt(request: wire.Submit) -> list[int]:
    """Return the prompt with marks for its pictures."""
    found = list(request.token_ids)
    for one in request.images:
        found[one.start : one.start + one.length] = [
            _mark(one.digest, place) for place in range(one.length)
        ]
    return found


def marked_chunk(chunk: Chunk) -> list[int]:
    """Return the tokens of ``chunk`` with marks for the embeddings that it is given."""
    found = list(chunk.token_ids)
    for shown in chunk.pictures:
        for number, place in enumerate(shown.places, shown.first):
            found[place] = _mark(shown.digest, number)
    assert IMAGE not in found, "every position of a picture has its embedding"
    return found


def tokens_of(content: Sequence[int]) -> list[int]:
    """Return ``content`` without marks."""
    return [IMAGE if item >= _FIRST_MARK else item for item in content]


def pictures_in(content: Sequence[int]) -> list[Picture]:
    return list(_pictures_in(content))


def _pictures_in(content: Sequence[int]) -> Iterator[Picture]:
    for position, item in enumerate(content):
        number, place = divmod(item - _FIRST_MARK, _STEP)
        if item >= _FIRST_MARK and place == 0:
            yield Picture(position, LENGTHS[number], DIGESTS[number])


def _mark(digest: bytes, place: int) -> int:
    return _FIRST_MARK + digest[0] * _STEP + place
