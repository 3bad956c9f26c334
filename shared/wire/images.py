"""Pictures in a `Submit`: their positions in the prompt, and the inputs of the vision encoder."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import msgspec

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
"""Files that a router needs besides the tokenizer to prepare pictures for a model."""

MAX_IMAGES = 256
"""Limit per message."""
MAX_IMAGE_BYTES = 1 << 30
"""Limit for the arrays of all pictures in one message."""
MAX_DIMENSIONS = 8
"""Limit per array."""
DIGEST_BYTES = 32

ArrayType = Literal["float32", "float16", "int64", "int32", "uint8", "bool"]
_ITEM_BYTES: dict[str, int] = {
    "float32": 4,
    "float16": 2,
    "int64": 8,
    "int32": 4,
    "uint8": 1,
    "bool": 1,
}


class Vision(msgspec.Struct, frozen=True, kw_only=True):
    """How a router prepares pictures for a model that accepts them."""

    model_type: str  # mlx-vlm's package that contains the processor
    placeholder: (
        str  # the text that stands for one picture in a prompt: one token, which is expanded
    )
    placeholder_id: int  # that token's id
    image_token_id: int  # the tokens of an expansion that are replaced by embeddings
    # Text that the processor puts around each placeholder. It is tokenized with the text there.
    before: str = ""
    after: str = ""


class ArraySpec(msgspec.Struct, frozen=True, kw_only=True):
    """An array; a frame of the message has its bytes, in C order and little-endian."""

    name: str  # the vision encoder's name for it, such as "pixel_values"
    dtype: ArrayType
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]


class ImagePart(msgspec.Struct, frozen=True, kw_only=True):
    """A picture in the prompt of a `Submit`."""

    # Identifies pixels and processor: equal digests mean equal arrays and equal embeddings.
    digest: bytes
    start: int  # the position of its first token
    length: int  # number of tokens: those replaced by embeddings, and those between them
    # Empty if an earlier picture of the message has the same digest.
    arrays: tuple[ArraySpec, ...] = ()
    # For models whose positions have three axes: the size of the embeddings in time, rows and
    # columns. The engine reads it from the arrays.
    grid: tuple[int, int, int] | None = None


class ImagesWrong(Exception):
    """The pictures of a message are invalid."""


def check_images(
    images: Sequence[ImagePart], prompt_length: int, frames: Sequence[bytes | memoryview]
) -> None:
    """Raise `ImagesWrong` unless ``images`` fit the prompt and ``frames`` are their arrays."""
    if len(images) > MAX_IMAGES:
        raise ImagesWrong(f"{len(images)} pictures, the limit is {MAX_IMAGES}")
    if sum(len(frame) for frame in frames) > MAX_IMAGE_BYTES:
        raise ImagesWrong(f"the pictures are larger than {MAX_IMAGE_BYTES >> 20} MB")
    specs = [spec for image in images for spec in image.arrays]
    if any(len(spec.shape) > MAX_DIMENSIONS for spec in specs):
        raise ImagesWrong(f"an array has more than {MAX_DIMENSIONS} dimensions")
    if any(size < 1 for spec in specs for size in spec.shape):
        raise ImagesWrong("an array is empty or has a negative size")
    sizes = [spec.nbytes for spec in specs]
    if sizes != [len(frame) for frame in frames]:
        raise ImagesWrong("the shapes of the arrays do not match their bytes")
    known: set[bytes] = set()
    end = 0
    for number, image in enumerate(images):
        if len(image.digest) != DIGEST_BYTES:
            raise ImagesWrong(f"the digest of picture {number} does not have {DIGEST_BYTES} bytes")
        if image.start < end or image.length < 1:
            raise ImagesWrong(f"picture {number} is empty or overlaps the previous one")
        if bool(image.arrays) == (image.digest in known):
            raise ImagesWrong(f"picture {number} has no arrays, or arrays that were already sent")
        known.add(image.digest)
        end = image.start + image.length
    if end > prompt_length - 1 and images:
        raise ImagesWrong("nothing follows the last picture in the prompt")
