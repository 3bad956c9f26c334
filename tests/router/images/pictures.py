"""Pictures as clients send them, good and bad."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from collections.abc import Iterator
from typing import Any

from PIL import Image

from shared.wire import Vision
from tests.tiny_models import VOCAB_SIZE

VISION = Vision(
    model_type="idefics3",
    placeholder="<image>",
    placeholder_id=VOCAB_SIZE,
    image_token_id=VOCAB_SIZE,
)
IMAGE_TOKEN = VOCAB_SIZE


def picture(
    colour: Any = "red", size: tuple[int, int] = (32, 16), mode: str = "RGB"
) -> Image.Image:
    return Image.new(mode, size, colour)


def encoded(image: Image.Image, format: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def in_base64(content: bytes) -> str:
    return base64.b64encode(content).decode()


def data_url(content: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{in_base64(content)}"


def png_header(width: int, height: int, *, depth: int = 8, colour: int = 2) -> bytes:
    """Return a PNG that says it has so many pixels, and has none."""
    header = _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    pixels = _chunk(b"IDAT", zlib.compress(b"\0" * 64))
    return b"\x89PNG\r\n\x1a\n" + header + pixels + _chunk(b"IEND", b"")


def _chunk(kind: bytes, content: bytes) -> bytes:
    check = zlib.crc32(kind + content)
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", check)


def webp_header(width: int, height: int) -> bytes:
    size = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    body = b"WEBPVP8X" + struct.pack("<I", 10) + b"\x10\0\0\0" + size
    return b"RIFF" + struct.pack("<I", len(body)) + body


def bad_pictures() -> Iterator[tuple[str, str]]:
    """Yield about 100 contents of images, in base64 or as URLs, with a word of why each is bad."""
    photo = Image.effect_noise((64, 48), 90).convert("RGB")
    for format in ("PNG", "JPEG", "WEBP", "GIF"):
        whole = encoded(photo, format)
        for part in range(1, 31, 3):
            cut = whole[: max(1, len(whole) * part // 48)]
            yield data_url(cut), "image"
        for at in range(12, 24, 2):  # damage in the header
            damaged = whole[:at] + b"\xff\xff\xff\xff" + whole[at + 4 : len(whole) // 2]
            yield data_url(damaged), "image"
    for width, height in ((60_000, 60_000), (2**31 - 1, 1), (1, 2**31 - 1), (100_000, 100_000)):
        yield data_url(png_header(width, height)), "pixels"
    for depth, colour in ((16, 2), (16, 0), (8, 6), (1, 0), (8, 3)):
        yield data_url(png_header(60_000, 60_000, depth=depth, colour=colour)), "image"
    for width, height in ((16_383, 16_383), (2**24, 2**24), (60_000, 60_000)):
        yield data_url(webp_header(width, height)), "pixels"
    gif = bytearray(encoded(photo, "GIF"))
    gif[6:10] = struct.pack("<HH", 60_000, 60_000)
    yield data_url(bytes(gif)), "pixels"
    yield data_url(png_header(0, 10)), "image"
    svg = b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg"/>'
    zeros = b"\0" * 64
    unreadable = [b"\0", b"II*\0" + zeros, b"BM" + zeros, b"\0\0\0\x18ftypheic" + zeros]
    unreadable += [b"<!doctype html><p>no", *(encoded(photo, f) for f in ("BMP", "TIFF", "ICO"))]
    for other, word in (
        *((each, "cannot be read") for each in unreadable),
        *((b"", "empty"), (svg, "SVG"), (b"<svg/>", "SVG"), (b"%PDF-1.7\n", "PDF")),
        (b"\x89PNG\r\n\x1a\n", "image"),
    ):
        yield data_url(other), word
    good = in_base64(encoded(photo))
    for rest in (",hello", "image/png,hello", "image/png;base64,!!!!", "image/png;base64,äöü"):
        yield f"data:{rest}", "base64"
    yield "data:" + "x" * 1000, "base64"
    yield f"data:text/plain;base64,{good}", "not an image type"
    yield f"data:application/pdf;base64,{good}", "PDF"
    yield good, "URL"
    yield "", "URL"


def forbidden_urls(port: int) -> list[str]:
    """Return URLs that no server may ask, most of them of a server on loopback at ``port``."""
    hosts = ("127.0.0.1", "localhost", "[::1]", "2130706433", "0x7f.1", "[::ffff:127.0.0.1]")
    own = [f"{scheme}://{host}:{port}/x.png" for scheme in ("http", "https") for host in hosts]
    others = ["https://169.254.169.254/latest/meta-data", "https://10.0.0.1/x.png", "https://"]
    others += ["file:///etc/passwd", "ftp://127.0.0.1/x", "//localhost/x.png"]
    return [*own, *others, f"https://user@localhost:{port}/"]
