"""The arrays of pictures, received with requests and kept until they end."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from struct import unpack
from typing import NamedTuple

from msgspec import structs

from shared import wire
from shared.wire import ArraySpec, Submit

RequestKey = tuple[str, int]
"""The id and attempt of a request."""
Pixels = tuple[tuple[ArraySpec, bytes], ...]
"""The arrays of one picture."""


class TooLarge(Exception):
    """A request, or one of its pictures, exceeds a limit. The text names both."""


class ScoreLimit(NamedTuple):
    """The limit of the attention scores of a picture that attends to itself as a whole."""

    patch_size: int  # side length in pixels
    pair_bytes: int  # of the scores of two patches, in all heads
    max_bytes: int  # of all scores

    def check(self, patches: int) -> None:
        """Raise `TooLarge` if the scores of so many ``patches`` do not fit."""
        size_bytes = patches**2 * self.pair_bytes
        if size_bytes > self.max_bytes:
            raise TooLarge(
                f"a picture has {patches} patches, and attention among them takes "
                f"{size_bytes / 1e9:.1f} GB; this engine has {self.max_bytes / 1e9:.1f} GB for it. "
                "Send a smaller picture"
            )


class PixelStore:
    """Arrays by digest. They stay until their request ends, because a restarted request needs
    them again."""

    def __init__(self, max_bytes: int, merge: int = 0, scores: ScoreLimit | None = None) -> None:
        """``max_bytes`` limits the arrays of all requests together, in host memory. ``merge``:
        side length, in patches, of the square behind one embedding, if positions have axes;
        otherwise 0. ``scores`` limits each picture; None: its size does not matter."""
        self._merge, self._scores = merge, scores
        self._max_bytes = max_bytes
        self._by_digest: dict[bytes, Pixels] = {}
        self._holders: dict[RequestKey, frozenset[bytes]] = {}
        self.nbytes = 0

    def hold(self, request: Submit, frames: Sequence[bytes]) -> bool:
        """Store the arrays of ``request``. Return False if there is no room for them now.
        Raises: TooLarge if there never will be."""
        rest = iter(frames)
        own = {
            image.digest: tuple((spec, next(rest)) for spec in image.arrays)
            for image in request.images
            if image.arrays
        }
        if sum(map(_nbytes, own.values())) > self._max_bytes:
            raise TooLarge(f"the pictures take more than {self._max_bytes / 1e6:.0f} MB")
        new = own.keys() - self._by_digest.keys()
        size = sum(_nbytes(own[digest]) for digest in new)
        if size and self.nbytes + size > self._max_bytes:
            return False
        self._by_digest.update((digest, own[digest]) for digest in new)
        self._holders[request.request_id, request.attempt] = frozenset(own)
        self.nbytes += size
        return True

    def with_grids(self, request: Submit) -> Submit:
        """Return ``request`` with the grid of each picture if positions have axes, and with none
        otherwise, regardless of the request: blocks with equal names must have equal positions.
        Raises: ValueError if the arrays have no grid, and TooLarge if they have too many
        patches."""
        pixels, merge = self._by_digest, self._merge
        images = []
        for one in request.images:
            its = pixels[one.digest]
            grid = _grid(its, merge) if merge else None
            if self._scores is not None:
                size = self._scores.patch_size
                self._scores.check(grid[1] * grid[2] * merge**2 if grid else _patches(its, size))
            images.append(structs.replace(one, grid=grid))
        return structs.replace(request, images=tuple(images))

    def keep_only(self, live: Collection[RequestKey]) -> None:
        """Forget the arrays of all requests not in ``live``."""
        gone = self._holders.keys() - live
        if not gone:
            return
        for key in gone:
            del self._holders[key]
        needed = frozenset().union(*self._holders.values())
        for digest in self._by_digest.keys() - needed:
            self.nbytes -= _nbytes(self._by_digest.pop(digest))

    def find(self, digest: bytes) -> Pixels | None:
        return self._by_digest.get(digest)

    @property
    def is_empty(self) -> bool:
        return not self._holders


def take_pictures(
    request: wire.Submit, frames: Sequence[bytes], pixels: PixelStore | None
) -> wire.Submit | wire.Refused:
    """Store the ``frames`` of ``request`` in ``pixels``. Return the request with what its arrays
    say, or why it is refused."""

    def refused(reason: wire.RefusalReason, message: str) -> wire.Refused:
        return wire.Refused.of(request, reason, message, "images")

    if pixels is None:
        return refused("unsupported", "this engine does not accept images for this model")
    try:
        wire.check_images(request.images, len(request.token_ids), frames)
    except wire.ImagesWrong as error:
        return refused("invalid", str(error))
    try:
        if not pixels.hold(request, frames):
            return refused("full", "the engine has no memory left for pictures")
        return pixels.with_grids(request)
    except TooLarge as error:
        return refused("too_large", str(error))
    except ValueError as error:
        return refused("invalid", str(error))


def _grid(pixels: Pixels, merge: int) -> tuple[int, int, int]:
    for spec, frame in pixels:
        if spec.name == "image_grid_thw" and spec.dtype == "int64" and spec.nbytes == 24:
            time, rows, columns = unpack("<3q", frame)
            if min(time, rows // merge, columns // merge) > 0:
                return time, rows // merge, columns // merge
    raise ValueError("a picture has no grid")


def _patches(pixels: Pixels, size: int) -> int:
    """Return the number of patches of a picture in pixels, with this ``size`` of each side. Raises:
    ValueError if it is not in pixels."""
    height, width = next((spec.shape for spec, _ in pixels if spec.name == "pixel_values"), ())[-2:]
    return (height // size) * (width // size)


def _nbytes(pixels: Pixels) -> int:
    return sum(len(frame) for _, frame in pixels)
