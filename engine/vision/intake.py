"""Incoming requests with pictures."""

from __future__ import annotations

from collections.abc import Sequence

from engine.vision.pixels import PixelStore, TooLarge
from shared import wire


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
