from __future__ import annotations

import pytest

from shared.hashing import Picture, block_hashes
from shared.wire import (
    MAX_IMAGES,
    ArraySpec,
    ImagePart,
    ImagesWrong,
    ToEngine,
    check_images,
    decode,
    encode,
)
from tests.shared.submits import submit

ROOT = bytes(16)
IDS = [7] * 64


def picture(digest: int = 1, start: int = 2, length: int = 3, arrays: int = 1) -> ImagePart:
    spec = ArraySpec(name="pixel_values", dtype="float32", shape=(2, 2))
    return ImagePart(
        digest=bytes([digest]) * 32, start=start, length=length, arrays=(spec,) * arrays
    )


def shaped(*shape: int) -> ImagePart:
    spec = ArraySpec(name="pixel_values", dtype="uint8", shape=shape)
    return ImagePart(digest=bytes(32), start=0, length=1, arrays=(spec,))


def test_pictures_arrive_with_their_bytes() -> None:
    sent = submit("a", [1] * 9, attempt=1, images=(picture(),))
    message, frames = decode(encode(sent, memoryview(bytes(16))), ToEngine)
    assert message == sent
    check_images(message.images, 9, frames)


@pytest.mark.parametrize(
    ("images", "frames", "reason"),
    [
        ([picture()], [], "shapes of the arrays"),
        ([picture()], [bytes(15)], "shapes of the arrays"),
        ([picture()], [bytes(16)] * 2, "shapes of the arrays"),
        ([picture(start=-1)], [bytes(16)], "overlaps"),
        ([picture(length=0)], [bytes(16)], "overlaps"),
        ([picture(), picture(2, 4)], [bytes(16)] * 2, "overlaps"),
        ([picture(), picture(1, 6)], [bytes(16)] * 2, "already sent"),
        ([picture(arrays=0)], [], "no arrays"),
        ([picture(start=7)], [bytes(16)], "follows"),
        ([picture(start=1 << 40)], [bytes(16)], "follows"),
        ([picture()] * (MAX_IMAGES + 1), [], "limit"),
        ([ImagePart(digest=b"short", start=0, length=1)], [], "digest"),
        ([shaped(-2, -2)], [bytes(4)], "negative"),
        ([shaped(0)], [b""], "empty"),
        ([shaped(*[2**63] * 5000)], [b""], "dimensions"),
    ],
)
def test_pictures_that_do_not_fit_are_refused(
    images: list[ImagePart], frames: list[bytes], reason: str
) -> None:
    with pytest.raises(ImagesWrong, match=reason):
        check_images(images, 10, frames)


def test_equal_pictures_share_arrays() -> None:
    check_images([picture(), picture(1, 6, arrays=0)], 10, [bytes(16)])


def shown(*pictures: tuple[int, int, int]) -> list[bytes]:
    return block_hashes(ROOT, IDS, 16, [Picture(s, n, bytes([d]) * 32) for s, n, d in pictures])


def test_a_block_is_named_by_the_pictures_before_its_end() -> None:
    one = shown((20, 20, 1))
    assert one == shown((20, 20, 1)), "the same picture"
    assert one[0] == shown()[0] and shown((64, 3, 1)) == shown(), "no picture before its end"
    assert one[:3] == shown((20, 20, 1), (60, 2, 2))[:3], "a later picture"
    assert one[1] != shown((21, 19, 1))[1], "the same picture elsewhere"
    assert not set(one[1:]) & set(shown((20, 20, 2))), "another picture"


def test_pictures_that_end_at_a_border_are_not_in_the_next_block() -> None:
    # The chain names them; the block alone does not.
    first = block_hashes(ROOT, IDS, 16, [Picture(0, 16, bytes(32))])
    assert first[1] == block_hashes(first[0], IDS[16:], 16)[0]
