from __future__ import annotations

import pytest

from router.errors import InvalidRequest, Unavailable
from router.images.memory import HeldMemory, ImageCache, ImageMemory
from router.schemas.images import ModelImage


def prepared(size: int) -> ModelImage:
    return ModelImage(b"d" * 32, (), (), (b"x" * size,))


def test_no_key_of_several_can_fill_the_memory() -> None:
    memory = ImageMemory(1000)
    first, second = (HeldMemory(memory, "a", alone=False) for _ in range(2))
    first.hold(400)
    with pytest.raises(Unavailable):
        second.hold(200)
    other = HeldMemory(memory, "b", alone=False)
    other.hold(250)
    for each in (first, second, other):
        each.close()
    assert memory.used_bytes == 0


def test_a_key_that_is_alone_may_fill_it_with_several_requests() -> None:
    memory = ImageMemory(1000)
    for _ in range(2):
        HeldMemory(memory, "", alone=True).hold(500)
    with pytest.raises(Unavailable):
        HeldMemory(memory, "", alone=True).hold(1)


def test_a_request_that_needs_more_than_half_is_an_error_of_its_own() -> None:
    held = HeldMemory(ImageMemory(1000), "", alone=True)
    held.hold(300)
    with pytest.raises(InvalidRequest):
        held.hold(300)
    held.close()


def test_an_image_of_several_requests_counts_once() -> None:
    memory, image = ImageMemory(1000), prepared(300)
    holders = [HeldMemory(memory, key, alone=False) for key in "abc"]
    for holder in holders:
        holder.hold_image(image)
        holder.hold_image(image)
    assert memory.used_bytes == 300
    for holder in holders:
        assert memory.used_bytes == 300
        holder.close()
        holder.close()
    assert memory.used_bytes == 0


def test_the_cache_drops_what_was_used_least_lately() -> None:
    cache = ImageCache(1000)
    images = {name: prepared(400) for name in "abc"}
    cache.put("a", images["a"])
    cache.put("b", images["b"])
    assert cache.get("a") is images["a"]
    cache.put("c", images["c"])
    cache.put("large", prepared(2000))
    kept = [images["a"], None, images["c"], None]
    assert [cache.get(name) for name in ("a", "b", "c", "large")] == kept
    assert cache.used_bytes == 800
