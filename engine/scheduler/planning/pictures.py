"""Pictures in prompts: which are encoded, which are encoded next, and which are dropped.

Embeddings have their own part of the ledger, so that nothing else waits for their memory. The
plan that starts a chunk with a picture is the last one that needs its embeddings."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from engine.plan import EncodePicture, ShownPart
from engine.scheduler.config import SchedulerConfig
from engine.scheduler.sequences.sequence import Sequence, SequencePicture

LARGEST_SHARE = 1 / 4
"""Max fraction of the memory for the embeddings of one picture: a block of a prompt may contain
the end of one picture and the beginning of another."""
MAX_GROUP_S = 1.0
"""Max time that a prompt whose pictures are encoded waits for those of others."""


class Missing(NamedTuple):
    """The next picture to encode, or None, and the position up to which chunks may go until
    then."""

    picture: SequencePicture | None
    limit: int


@dataclass(eq=False, slots=True)
class _KeptPicture:
    size_bytes: int
    layers_done: int = 0  # once every plan made so far has run


class PictureTable:
    """Embeddings by digest, the least recently used first."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._entries: OrderedDict[bytes, _KeptPicture] = OrderedDict()
        self._seconds_per_byte = 0.0
        """Encoding time per byte of the arrays; 0 until measured."""
        self.dropped: list[bytes] = []
        self.used_bytes = 0

    def is_ready(self, digest: bytes) -> bool:
        entry = self._entries.get(digest)
        return entry is not None and entry.layers_done >= self._config.picture_layers

    def missing(self, seq: Sequence, limit: int) -> Missing:
        """Return the picture that ``seq`` needs next before ``limit``.

        All pictures of a chunk that fit into memory are encoded first, so that the chunk is not
        cut."""
        size, start = self._config.block_size, seq.num_computed_tokens
        window = min(limit, start + self._config.max_chunk_tokens)
        ahead = [one for one in seq.pictures if start < one.end and one.start < limit]
        needed = [one for one in ahead if one.start < start + size]  # for the next block
        for number, one in enumerate(ahead):
            if self.is_ready(one.digest):
                self._entries.move_to_end(one.digest)
                continue
            before = max(start, one.start // size * size)
            if one.start >= window and before > start:
                return Missing(None, before)
            kept = {each.digest for each in (ahead[: number + 1] if before > start else needed)}
            if one.digest in self._entries or self._has_room(one, kept):
                return Missing(one, before)
            return Missing(None, before)
        return Missing(None, limit)

    def begin(self, picture: SequencePicture, kept: Collection[bytes]) -> bool:
        """Make room for the embeddings of ``picture``, unless that was done before. Return
        whether it was done now. Pictures in ``kept`` or being encoded stay."""
        if picture.digest in self._entries:
            return False
        size_bytes = self._size_bytes(picture)
        for digest in list(self._entries):
            if self.used_bytes + size_bytes <= self._config.picture_bytes:
                break
            if digest not in kept and self.is_ready(digest):
                self.drop(digest)
        self._entries[picture.digest] = _KeptPicture(size_bytes)
        self.used_bytes += size_bytes
        return True

    def layer_s(self, picture: SequencePicture) -> float:
        """Return the predicted time of one layer of ``picture`` in seconds; 0 if unknown."""
        return self._seconds_per_byte * picture.size_bytes / self._config.picture_layers

    def fits_beside(
        self, picture: SequencePicture, kept: Collection[bytes], seconds: float
    ) -> bool:
        """Return whether there is room for ``picture`` besides those in ``kept``, and the rest of
        its encoding takes at most ``seconds``, as far as that is known."""
        entry = self._entries.get(picture.digest)
        if entry is None and not self._has_room(picture, kept):
            return False
        layers = self._config.picture_layers - (entry.layers_done if entry else 0)
        return layers * self.layer_s(picture) <= seconds

    def encode(self, picture: SequencePicture, layers: int) -> EncodePicture:
        """Return the operation that computes up to ``layers`` more layers, and record it as
        planned."""
        entry = self._entries[picture.digest]
        layers = min(layers, self._config.picture_layers - entry.layers_done)
        entry.layers_done += layers
        is_last = entry.layers_done == self._config.picture_layers
        return EncodePicture(picture.digest, picture.token_ids, layers, is_last)

    def observe(self, size_bytes: float, elapsed_s: float) -> None:
        """Learn from the time of a part of an encoding."""
        seen = elapsed_s / size_bytes
        known = self._seconds_per_byte
        self._seconds_per_byte = seen if not known else known + 0.3 * (seen - known)

    def drop(self, digest: bytes) -> None:
        entry = self._entries.pop(digest, None)
        if entry is not None:
            self.used_bytes -= entry.size_bytes
            self.dropped.append(digest)

    def drop_abandoned(self, prefilling: Iterable[Sequence]) -> None:
        """Drop encodings in progress that none of ``prefilling`` needs any more, because nothing
        else frees their memory. A sequence that lost its slot encodes its pictures again."""
        begun = {digest for digest in self._entries if not self.is_ready(digest)}
        if begun:
            begun -= {one.digest for seq in prefilling for one in seq.pictures_ahead}
            for digest in begun:
                self.drop(digest)

    def take_dropped(self) -> list[bytes]:
        taken, self.dropped = self.dropped, []
        return taken

    def clear(self) -> None:
        """Forget all pictures, because the executor has lost them too."""
        self._entries.clear()
        self.dropped.clear()
        self.used_bytes = 0

    def _has_room(self, picture: SequencePicture, kept: Collection[bytes]) -> bool:
        """Return whether there is room besides pictures in ``kept`` and those being encoded."""
        held = sum(
            entry.size_bytes
            for digest, entry in self._entries.items()
            if digest in kept or not self.is_ready(digest)
        )
        return held + self._size_bytes(picture) <= self._config.picture_bytes

    def _size_bytes(self, picture: SequencePicture) -> int:
        return len(picture.places) * self._config.picture_token_bytes


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


class WholePictures:
    """Limits chunks and prefixes so that no picture is divided."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._size = config.block_size
        self._max_tokens = config.whole_picture_tokens

    def restorable_blocks(self, seq: Sequence, blocks: int) -> int:
        """Return how many of the first ``blocks`` blocks of ``seq`` may be restored. A picture
        cannot be continued without its beginning."""
        while self._max_tokens and (cut := _cut_by(seq, blocks * self._size)) is not None:
            blocks = cut.first // self._size
        return blocks

    def chunk_end(self, seq: Sequence, end: int) -> int:
        """Return the end of the next chunk of ``seq``, which would be ``end`` without pictures.

        A chunk that would cut a picture ends after it, or before it if the chunk would be too
        long. The end may lie within a block: with many pictures, each may begin where the
        previous one ends."""
        if not self._max_tokens or (cut := _cut_by(seq, end)) is None:
            return end
        start = seq.num_computed_tokens
        if cut.last - start <= self._max_tokens or cut.first <= start:
            return cut.last
        return cut.first


def _cut_by(seq: Sequence, position: int) -> SequencePicture | None:
    """Return the picture of ``seq`` with embeddings both before and after ``position``."""
    return next((one for one in seq.pictures if one.first < position < one.last), None)


def shown_parts(seq: Sequence, start: int, end: int) -> tuple[ShownPart, ...]:
    """Return the embeddings used by positions ``start`` to ``end`` (exclusive) of ``seq``."""
    found = []
    for one in seq.pictures:
        first, last = bisect_left(one.places, start), bisect_left(one.places, end)
        if first < last:
            places = tuple(at - start for at in one.places[first:last])
            found.append(ShownPart(one.digest, first, places))
    return tuple(found)


# Positions of models whose pictures have three axes (see `engine.batch.axes`).


def position_shift(seq: Sequence, end: int) -> int:
    """Return the shift of text positions after all pictures that end before ``end``. A picture
    takes as many positions as its longest side has embeddings."""
    return sum(
        max(one.grid) - len(one.places)
        for one in seq.pictures
        if one.grid is not None and one.end <= end
    )


def axes_of(seq: Sequence, start: int, end: int) -> tuple[tuple[int, ...], ...]:
    """Return the positions from ``start`` to ``end`` (exclusive) in each axis; empty if no
    picture is there, or its model uses no axes."""
    found: list[list[int]] = [[], [], []]
    at = start
    for one in seq.pictures:
        if one.grid is None or one.start >= end or one.end <= start:
            continue
        _, rows, columns = one.grid
        shift = position_shift(seq, one.start)
        text, base = range(at + shift, one.start + shift), one.start + shift
        numbers = range(max(start, one.start) - one.start, min(end, one.end) - one.start)
        found[0] += [*text, *(base + n // (rows * columns) for n in numbers)]
        found[1] += [*text, *(base + n // columns % rows for n in numbers)]
        found[2] += [*text, *(base + n % columns for n in numbers)]
        at = one.end
    if not found[0]:
        return ()
    shift = position_shift(seq, at)
    return tuple((*axis, *range(at + shift, end + shift)) for axis in found)
