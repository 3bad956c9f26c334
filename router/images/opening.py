"""Encoded images to upright RGB pixels, and the checks before anything is decoded.

Runs in the image decoder process, which may crash (`router.images.decoder`). Pillow is imported
inside functions: a router without the extra `vision` does not have it.
"""

from __future__ import annotations

import io
import struct
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
TAKEN = "supported formats are png, jpeg, webp and gif"

_UPRIGHT = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}
"""Pillow's transposition that undoes an EXIF orientation."""
_ORIENTATION = 0x0112
_WEBP_HEADER_BYTES = 30

Reason = Literal["format", "damaged", "pixels", "unusable", "time", "memory", "process"]
"""Reasons for rejecting an image, in one word: the label of a metric."""


class ImageRefused(Exception):
    """The image is rejected. The message continues "the image"."""

    def __init__(self, reason: Reason, text: str) -> None:
        super().__init__(text)
        self.reason: Reason = reason


def open_image(content: bytes, max_pixels: int) -> Image:
    """Return the first frame of ``content``, upright and in RGB, with transparency on white.

    Raises `ImageRefused`. Nothing is decoded before the header has shown at most ``max_pixels``.
    """
    from PIL import Image, ImageFile, UnidentifiedImageError

    Image.MAX_IMAGE_PIXELS = None  # checked here with our own limit
    ImageFile.LOAD_TRUNCATED_IMAGES = False
    _check_kind(content)
    _check_size(_webp_size(content), max_pixels)
    try:
        image = Image.open(io.BytesIO(content), formats=FORMATS)
    except UnidentifiedImageError:
        raise ImageRefused("format", f"cannot be read: {TAKEN}.") from None
    except MemoryError:
        raise
    except Exception as error:  # Pillow raises anything for a damaged header
        raise _damaged(error) from None
    _check_size(image.size, max_pixels)
    try:
        image.load()
        _check_size(image.size, max_pixels)
        return _upright(_rgb(image), _orientation(image))
    except (MemoryError, ImageRefused):
        raise
    except Exception as error:
        raise _damaged(error) from None


def _check_kind(content: bytes) -> None:
    """Raise `ImageRefused` for content known to be something else."""
    start = content[:256].lstrip().lower()
    if not content:
        raise ImageRefused("format", "is empty.")
    if start.startswith(b"%pdf"):
        raise ImageRefused("format", f"is a PDF, which is not supported: {TAKEN}.")
    if start.startswith((b"<svg", b"<?xml", b"<!doctype svg")):
        raise ImageRefused("format", f"is SVG or XML: {TAKEN}.")


def _check_size(size: tuple[int, int] | None, max_pixels: int) -> None:
    if size is None:
        return
    width, height = size
    if width < 1 or height < 1:
        raise ImageRefused("damaged", "has no pixels.")
    if width * height > max_pixels:
        raise ImageRefused(
            "pixels",
            f"has {width} x {height} pixels; the limit is {max_pixels} in total.",
        )


def _webp_size(content: bytes) -> tuple[int, int] | None:
    """Return width and height from a WebP's header, None for other formats.

    Pillow allocates the whole canvas of a WebP when it opens the file. Source:
    https://developers.google.com/speed/webp/docs/riff_container
    """
    if content[:4] != b"RIFF" or content[8:12] != b"WEBP" or len(content) < _WEBP_HEADER_BYTES:
        return None
    match content[12:16]:
        case b"VP8X":
            width, height = (int.from_bytes(content[at : at + 3], "little") for at in (24, 27))
            return width + 1, height + 1
        case b"VP8L":
            bits = int.from_bytes(content[21:25], "little")
            return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
        case b"VP8 ":
            width, height = struct.unpack_from("<HH", content, 26)
            return width & 0x3FFF, height & 0x3FFF
    return None


def _rgb(image: Image) -> Image:
    """Return ``image`` in RGB. Pillow's own conversion clips 16-bit values at 255, and shows what
    is behind transparent pixels."""
    from PIL import Image

    if image.mode.startswith(("I", "F")):
        image = _eight_bits(image)
    has_alpha = image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info
    if not has_alpha:
        return image.convert("RGB")
    layer = image.convert("RGBA")
    white = Image.new("RGBA", layer.size, "white")
    return Image.alpha_composite(white, layer).convert("RGB")


def _eight_bits(image: Image) -> Image:
    """Return an image with 16 or more bits per pixel as 8-bit grey."""
    import numpy as np
    from PIL import Image

    values = np.asarray(image)
    most = 65535 if image.mode.startswith("I") else max(1.0, float(np.nanmax(values)))
    scaled = np.clip(np.nan_to_num(values.astype(np.float32)) * (255 / most), 0, 255)
    return Image.fromarray(scaled.round().astype(np.uint8))


def _orientation(image: Image) -> int:
    """Return the EXIF orientation; 1 (upright) if it cannot be read."""
    try:
        return int(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # EXIF is untrusted data: loops, wrong lengths
        return 1


def _upright(image: Image, orientation: int) -> Image:
    from PIL import Image

    name = _UPRIGHT.get(orientation)
    return image if name is None else image.transpose(getattr(Image.Transpose, name))


def _damaged(error: Exception) -> ImageRefused:
    text = " ".join(str(error).split())[:200] or type(error).__name__
    return ImageRefused("damaged", f"is damaged: {text}")
