"""Prompts with pictures that wait for each other's encodings."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from engine.scheduler.planning.pictures import PictureTable
from engine.scheduler.sequences.sequence import Sequence, SequencePicture

MAX_GROUP_S = 1.0
"""Max time that a prompt whose pictures are encoded waits for those of others."""


class WantedPicture(NamedTuple):
    """A picture to encode next."""

    seq: Sequence
    picture: SequencePicture
    kept: set[bytes]  # digests of pictures that have to stay


class PictureGroup:
    """Prompts whose pictures are encoded before the first of them begins, while no stream runs.

    If each began as soon as it could, the average would be no earlier and the last one later: the
    decodes of the first stream take half of the time, and a decode of one row takes about as long
    as one of many."""

    def __init__(self, pictures: PictureTable) -> None:
        self._pictures = pictures
        self._spent_s = 0.0

    def begun(self) -> None:
        """Record that a prompt has begun."""
        self._spent_s = 0.0

    def spend(self, seconds: float) -> None:
        """Add the predicted time of a part of an encoding."""
        self._spent_s += seconds

    def next(
        self,
        first: Sequence,
        others: Iterable[Sequence],
        limits: dict[Sequence, int],
        has_to_compute: Callable[[Sequence], bool],
    ) -> WantedPicture | None:
        """Return the next picture of ``others`` to encode before ``first`` begins; None if there is
        none, or ``first`` has waited long enough.

        ``limits``: as `PictureTable.missing` takes them. ``has_to_compute``: whether a prompt's
        next tokens come from nowhere else."""
        if not first.has_pictures_ahead:
            return None
        waiting = [
            seq
            for seq in others
            if seq.has_pictures_ahead and (first.is_background or not seq.is_background)
        ]
        kept = {one.digest for seq in (first, *waiting) for one in seq.pictures_ahead}
        for seq in waiting:
            picture = self._pictures.missing(seq, limits[seq]).picture
            if picture is None or not has_to_compute(seq):
                continue
            if not self._pictures.fits_beside(picture, kept, MAX_GROUP_S - self._spent_s):
                return None
            return WantedPicture(seq, picture, kept)
        return None
