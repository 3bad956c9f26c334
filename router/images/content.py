"""The content of images in requests, before decoding: `data:` URLs and base64."""

from __future__ import annotations

from typing import NamedTuple

from router.images.opening import ImageRefused

_MAX_HEAD_CHARS = 256
"""Max length of a `data:` URL's prefix, up to its comma."""


class EncodedImage(NamedTuple):
    """The undecoded content of an image."""

    data: bytes
    is_base64: bool


def encoded_image(source: str, media_type: str | None) -> EncodedImage:
    """Return the content of ``source``, a `data:` URL or base64, with the type given by the client.
    Raises `ImageRefused`. Copies ``source``, so call it on a thread."""
    start = 0
    if source[:5].lower() == "data:":
        comma = source.find(",", 0, _MAX_HEAD_CHARS)
        head = source[5:comma].lower() if comma > 0 else ""
        media_type, _, encoding = head.partition(";")
        if comma < 0 or encoding.rpartition(";")[2].strip() != "base64":
            raise ImageRefused("format", "is in a data: URL that is not base64.")
        start = comma + 1
    kind = (media_type or "").strip().lower()
    if kind == "application/pdf":
        raise ImageRefused("format", "is a PDF, which is not supported.")
    if kind and not kind.startswith("image/") and kind != "application/octet-stream":
        raise ImageRefused("format", f"has the type '{kind[:64]}', which is not an image type.")
    try:
        return EncodedImage(source[start:].encode("ascii"), True)
    except UnicodeEncodeError:
        raise ImageRefused("format", "is not valid base64.") from None
