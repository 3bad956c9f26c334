"""The settings for images in requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shared.flags import flag
from shared.wire import MAX_IMAGES


@dataclass(frozen=True, kw_only=True)
class ImageSettings:
    """Settings for models that accept images."""

    GROUP: ClassVar = "images"

    max_images: int = flag(32, "max images per request", at_least=1, at_most=MAX_IMAGES)
    max_image_pixels: int = flag(50_000_000, "max pixels per image", at_least=1)
    max_image_bytes: int = flag(
        20_971_520,
        "max bytes of all images in a request, in addition to --max-request-bytes",
        at_least=1,
    )
    image_memory_mb: int = flag(
        1024,
        "router memory in MB for images in use and for cached ones",
        at_least=8,
    )
    image_hosts: tuple[str, ...] = flag(
        (),
        "host from which https: images may be fetched; .NAME: all its subdomains; *: any",
        shown_default="none: no images are fetched",
    )
