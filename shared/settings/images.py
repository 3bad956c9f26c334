"""The group of settings about images in requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shared.flags import flag
from shared.wire import MAX_IMAGES


@dataclass(frozen=True, kw_only=True)
class ImageSettings:
    """For models that take images."""

    GROUP: ClassVar = "images"

    max_images: int = flag(32, "images of one request", at_least=1, at_most=MAX_IMAGES)
    max_image_pixels: int = flag(50_000_000, "pixels of one image", at_least=1)
    max_image_bytes: int = flag(
        20_971_520, "bytes of all images of a request, beside --max-request-bytes", at_least=1
    )
    image_memory_mb: int = flag(
        1024,
        "MB of the router's memory for images in use, and for those it may need again",
        at_least=8,
    )
    image_hosts: tuple[str, ...] = flag(
        (),
        "host from which https: images are fetched; .NAME: all below it; *: any",
        shown_default="none: no image is fetched",
    )
