"""Memory for images: in use by requests, and cached."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable

from router.errors import InvalidRequest, Unavailable
from router.fair_shares import FairShares
from router.schemas.images import ModelImage

_RETRY_AFTER_S = 2.0


class ImageMemory:
    """Counts the bytes of images that requests hold, as sent and as prepared.

    One request may hold half of the total.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._held = FairShares()
        self._images: dict[ModelImage, tuple[str, int]] = {}
        """The key for which an image is counted, and the requests that use it."""

    @property
    def used_bytes(self) -> int:
        return self._held.total

    def hold(self, key: str, more_bytes: int, *, alone: bool) -> None:
        """Count ``more_bytes`` for ``key``, which may be the only one (``alone``).

        Raises `Unavailable`.
        """
        if not self._held.has_room(key, self.limit_bytes, more_bytes, alone=alone):
            raise Unavailable(
                "The server is out of memory for images.",
                code="image_memory",
                retry_after_s=_RETRY_AFTER_S,
            )
        self._held.take(key, more_bytes)

    def let_go(self, key: str, fewer_bytes: int) -> None:
        self._held.give_back(key, fewer_bytes)

    def hold_image(self, key: str, image: ModelImage, *, alone: bool) -> None:
        """Count ``image`` once, however many requests use it. Raises `Unavailable`."""
        owner, count = self._images.get(image, (key, 0))
        if not count:
            self.hold(key, image.nbytes, alone=alone)
        self._images[image] = owner, count + 1

    def let_go_image(self, image: ModelImage) -> None:
        owner, count = self._images.pop(image)
        if count > 1:
            self._images[image] = owner, count - 1
        else:
            self.let_go(owner, image.nbytes)


class HeldMemory:
    """The memory held by one request of ``key``, until `close`."""

    def __init__(self, memory: ImageMemory, key: str, *, alone: bool) -> None:
        self._memory, self._key, self._alone = memory, key, alone
        self._bytes = 0
        self._images: set[ModelImage] = set()
        self._total_bytes = 0

    def hold(self, more_bytes: int) -> None:
        """Raises `InvalidRequest` above the limit for one request, and `Unavailable`."""
        self._check(more_bytes)
        self._memory.hold(self._key, more_bytes, alone=self._alone)
        self._bytes += more_bytes

    def hold_image(self, image: ModelImage) -> None:
        """Like `hold`, once for each image."""
        if image not in self._images:
            self._check(image.nbytes)
            self._memory.hold_image(self._key, image, alone=self._alone)
            self._images.add(image)

    def close(self) -> None:
        self._memory.let_go(self._key, self._bytes)
        for image in self._images:
            self._memory.let_go_image(image)
        self._bytes = 0
        self._images.clear()

    def _check(self, more_bytes: int) -> None:
        self._total_bytes += more_bytes
        limit = self._memory.limit_bytes // 2
        if self._total_bytes > limit:
            raise InvalidRequest(
                f"The images need more than {limit} bytes of memory: send fewer or smaller images.",
                code="image_too_large",
            )


class ImageCache:
    """Cached prepared images, by their source, in at most ``limit_bytes``. The least recently used
    are dropped. Thread-safe."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._images: OrderedDict[Hashable, ModelImage] = OrderedDict()
        self.used_bytes = 0
        self._lock = threading.Lock()
        """Guards everything above."""

    def get(self, key: Hashable) -> ModelImage | None:
        with self._lock:
            found = self._images.get(key)
            if found is not None:
                self._images.move_to_end(key)
            return found

    def put(self, key: Hashable, image: ModelImage) -> None:
        with self._lock:
            if key in self._images or image.nbytes > self._limit_bytes:
                return
            self._images[key] = image
            self.used_bytes += image.nbytes
            while self.used_bytes > self._limit_bytes:
                self.used_bytes -= self._images.popitem(last=False)[1].nbytes
