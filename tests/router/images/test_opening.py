"""Formats and kinds of pixels, as they become RGB."""

from __future__ import annotations

from typing import Any

import pytest
from PIL import Image

from router.images.opening import ImageRefused, open_image
from tests.router.images.pictures import encoded, picture, png_header, webp_header

MOST = 1_000_000


def corner(content: bytes) -> Any:
    image = open_image(content, MOST)
    assert image.mode == "RGB"
    return image.getpixel((0, 0))


def close(found: Any, wanted: tuple[int, int, int]) -> bool:
    return all(abs(one - other) <= 3 for one, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize(
    ("mode", "colour", "format", "wanted"),
    [
        *(("RGB", (250, 4, 4), format, (250, 4, 4)) for format in ("PNG", "JPEG", "WEBP", "GIF")),
        ("L", 100, "PNG", (100, 100, 100)),
        ("1", 1, "PNG", (255, 255, 255)),
        ("P", 0, "PNG", (0, 0, 0)),
        ("CMYK", (0, 255, 255, 0), "JPEG", (255, 0, 0)),
        ("RGBA", (255, 0, 0, 0), "PNG", (255, 255, 255)),
        ("RGBA", (255, 0, 0, 255), "PNG", (255, 0, 0)),
        ("LA", (0, 128), "PNG", (127, 127, 127)),
        ("I;16", 0x8000, "PNG", (128, 128, 128)),
        ("RGBA", (0, 0, 255, 0), "WEBP", (255, 255, 255)),
    ],
)
def test_formats_and_pixels_become_rgb(mode: str, colour: Any, format: str, wanted: Any) -> None:
    assert close(corner(encoded(picture(colour, mode=mode), format)), wanted)


def test_the_first_frame_is_taken() -> None:
    frames = [picture("red"), picture("blue")]
    for format in ("GIF", "WEBP", "PNG"):
        content = encoded(frames[0], format, save_all=True, append_images=frames[1:], duration=10)
        assert close(corner(content), (255, 0, 0))


UNDONE = [
    *(None, Image.Transpose.FLIP_LEFT_RIGHT, Image.Transpose.ROTATE_180),
    *(Image.Transpose.FLIP_TOP_BOTTOM, Image.Transpose.TRANSPOSE, Image.Transpose.ROTATE_90),
    *(Image.Transpose.TRANSVERSE, Image.Transpose.ROTATE_270),
]


@pytest.mark.parametrize(("orientation", "undone"), [*enumerate(UNDONE, 1)])
def test_orientation_is_respected(orientation: int, undone: Image.Transpose | None) -> None:
    upright = Image.new("RGB", (16, 8), "white")
    upright.paste("red", (0, 0, 8, 4))
    stored = upright if undone is None else upright.transpose(undone)
    exif = Image.Exif()
    exif[0x0112] = orientation
    found = open_image(encoded(stored, "PNG", exif=exif), MOST)
    assert found.size == (16, 8)
    assert found.getpixel((1, 1)) == (255, 0, 0) and found.getpixel((14, 6)) == (255, 255, 255)


def test_exif_that_points_at_itself_is_no_orientation() -> None:
    loop = b"Exif\0\0II*\0\x08\0\0\0\x01\0\x69\x87\x04\0\x01\0\0\0\x08\0\0\0\x08\0\0\0"
    assert close(corner(encoded(picture("red"), "JPEG", exif=loop)), (254, 0, 0))


@pytest.mark.parametrize(
    "content", [png_header(60_000, 60_000), webp_header(16_000, 16_000), png_header(1001, 1000)]
)
def test_a_large_image_is_refused_before_it_is_decoded(content: bytes) -> None:
    with pytest.raises(ImageRefused, match="the limit is 1000000") as refused:
        open_image(content, MOST)
    assert refused.value.reason == "pixels"
