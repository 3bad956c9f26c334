"""Prepares clients' images for models: limits, decoder processes, cache."""

from __future__ import annotations

import hashlib
import logging
import os
import queue
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from router.errors import InvalidRequest, NotSupported, Unavailable
from router.images.content import EncodedImage, encoded_image
from router.images.decoder import DecodeJob
from router.images.decoder_process import (
    TIME_LIMIT_S,
    DecoderAnswer,
    DecoderProcess,
)
from router.images.fetching import ImageFetcher, NotFetched
from router.images.memory import HeldMemory, ImageCache, ImageMemory
from router.images.metrics import ImageMetrics
from router.images.opening import ImageRefused
from router.schemas.images import ModelImage, SentImage
from router.tokens.work_pool import WorkPool
from shared.sandbox.worker_process import WorkerLost
from shared.settings import Settings
from shared.wire import Vision

logger = logging.getLogger(__name__)

MB = 1_000_000
_CACHED_SHARE = 4
"""The cache gets 1 / this of `--image-memory-mb`."""
_DEADLINE_S = 60.0


@dataclass(frozen=True)
class ImageProcessor:
    """How images are prepared for a model: the folder with its files, and its engine's
    description."""

    folder: Path
    vision: Vision


class ImagePreparer:
    """Prepares the images of all requests. Runs on the event loop; work that depends on the size of
    an image runs on threads, which wait for processes."""

    def __init__(self, settings: Settings, metrics: ImageMetrics) -> None:
        self._settings, self._metrics = settings, metrics
        count = max(2, min(4, (os.cpu_count() or 1) // 4))
        self._pool = WorkPool(
            count,
            deadline_s=_DEADLINE_S,
            on_refused=partial(metrics.rejected, "busy"),
            jobs_wait=True,
        )
        self._processes = [DecoderProcess() for _ in range(count)]
        self._idle: queue.LifoQueue[DecoderProcess] = queue.LifoQueue()
        for process in self._processes:
            self._idle.put(process)
        hosts = settings.image_hosts
        self._fetcher = ImageFetcher(hosts) if hosts else None
        limit_bytes = settings.image_memory_mb * MB
        self.memory = ImageMemory(limit_bytes - limit_bytes // _CACHED_SHARE)
        self._cache = ImageCache(limit_bytes // _CACHED_SHARE)
        metrics.watch_memory(lambda: self.memory.used_bytes + self._cache.used_bytes)
        self._locks: weakref.WeakValueDictionary[object, _Lock] = weakref.WeakValueDictionary()
        """Locks for images in preparation: requests with the same image wait for the first one."""
        self._locks_lock = threading.Lock()

    def close(self) -> None:
        self._pool.close()
        for process in self._processes:
            process.close()

    async def prepare(
        self,
        images: Sequence[SentImage],
        processor: ImageProcessor,
        key: str,
        scope: str,
        held: HeldMemory,
    ) -> list[ModelImage]:
        """Return each of ``images`` prepared by ``processor``, for a request of ``key``.

        Results are shared within ``scope``; ``held`` counts their memory. Raises `ApiError` with
        the field of the image.
        """
        self._check(images)
        left = self._settings.max_image_bytes - sum(map(_num_bytes, images))
        prepared: list[ModelImage] = []
        for image in images:
            try:
                fetched = None
                if _is_remote(image):
                    fetched = await self._fetch(image, left, key)
                    left -= len(fetched)
                    held.hold(len(fetched))
                size = image.size if fetched is None else len(fetched)
                work = partial(self._prepared, image, fetched, processor, scope)
                prepared.append(await self._pool.run(key, work, size))
                held.hold_image(prepared[-1])
            except ImageRefused as error:
                raise self._refused(image, error.reason, str(error)) from None
            except InvalidRequest as error:
                error.param = error.param or image.path
                raise
        return prepared

    def _check(self, images: Sequence[SentImage]) -> None:
        """Raise `InvalidRequest` for too many images or too many bytes."""
        most, limit = self._settings.max_images, self._settings.max_image_bytes
        if len(images) > most:
            self._metrics.rejected("count")
            raise InvalidRequest(
                f"There are more than {most} images, the limit of this server.",
                param=images[most].path,
                code="too_many_images",
            )
        total = 0
        for image in images:
            total += _num_bytes(image)
            if total > limit:
                self._metrics.rejected("bytes")
                raise InvalidRequest(
                    f"'{image.path}': the images up to this one have {total} bytes; the limit is "
                    f"{limit}.",
                    param=image.path,
                    code="image_too_large",
                )

    async def _fetch(self, image: SentImage, max_bytes: int, key: str) -> bytes:
        scheme = image.source[:8].partition(":")[0].lower()
        if self._fetcher is None or scheme != "https":
            text = "has a URL that is not a data: URL; send it as a data: URL."
            if scheme == "https":
                text = (
                    "has a URL, and this server fetches no images (--image-hosts); send it as "
                    "a data: URL."
                )
            raise self._refused(image, "host", text, code="invalid_image_url")
        try:
            return await self._fetcher.fetch(image.source, max_bytes, key)
        except NotFetched as error:
            reason = "host" if error.is_forbidden else "fetch"
            raise self._refused(image, reason, str(error), code="invalid_image_url") from None

    def _refused(
        self, image: SentImage, reason: str, text: str, code: str = "invalid_image"
    ) -> InvalidRequest:
        self._metrics.rejected(reason)
        return InvalidRequest(f"'{image.path}': the image {text}", param=image.path, code=code)

    # -- on the threads --------------------------------------------------------

    def _prepared(
        self, image: SentImage, fetched: bytes | None, processor: ImageProcessor, scope: str
    ) -> ModelImage:
        """Return ``image`` prepared. Raises `ImageRefused`, `NotSupported` and `Unavailable`."""
        if fetched is None:
            content = encoded_image(image.source, image.media_type)
        else:
            content = EncodedImage(fetched, False)
        digest = hashlib.sha256(content.data).digest()
        place = (scope, str(processor.folder), content.is_base64, digest)
        with self._locks_lock:
            lock = self._locks.setdefault(place, _Lock())
        with lock.lock:
            found = self._cache.get(place)
            if found is not None:
                self._metrics.cached()
                return found
            found = self._decode(content, processor)
            self._cache.put(place, found)
            return found

    def _decode(self, content: EncodedImage, processor: ImageProcessor) -> ModelImage:
        job = DecodeJob(
            folder=str(processor.folder),
            vision=processor.vision,
            max_pixels=self._settings.max_image_pixels,
            is_base64=content.is_base64,
        )
        process = self._idle.get()
        try:
            answer, frames = self._answer(process, job, content.data)
        except WorkerLost as error:
            if error.is_late:
                raise ImageRefused(
                    "time", f"took more than {TIME_LIMIT_S:g} s to decode."
                ) from None
            raise ImageRefused("process", "crashed the process that decoded it.") from None
        except OSError as error:
            raise Unavailable(
                f"No image decoder process can be started: {error.strerror or error}"
            ) from None
        finally:
            self._idle.put(process)
        if answer.is_fault_of_server:
            logger.warning("images are rejected: %s", answer.text)
            raise NotSupported(f"Images cannot be prepared for this model: {answer.text}")
        if answer.reason is not None:
            raise ImageRefused(answer.reason, answer.text)
        self._metrics.prepared(answer.seconds)
        return ModelImage(answer.digest, answer.expansion, answer.specs, frames)

    def _answer(self, process: DecoderProcess, job: DecodeJob, content: bytes) -> DecoderAnswer:
        """Raises OSError, and `WorkerLost` if the image has used up the time of a process, or has
        cost a second one too: the first may have been killed or stopped for another reason, or
        short of time."""
        for is_last in (False, True):
            try:
                return process.prepare(job, content)
            except WorkerLost as error:
                self._metrics.lost()
                if is_last or error.used_s >= TIME_LIMIT_S / 2:
                    raise
        raise AssertionError


class _Lock:
    """A lock that supports weak references."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


def _is_remote(image: SentImage) -> bool:
    return image.is_url and image.source[:5].lower() != "data:"


def _num_bytes(image: SentImage) -> int:
    """Return the approximate size of ``image`` in bytes, as far as it is known before it is
    fetched."""
    return 0 if _is_remote(image) else image.size * 3 // 4
