"""A process that decodes images and prepares them with the processors of models.

Image decoders are C code that reads untrusted data: a crash must not take down the router.
`python -m router.images.decoder` reads from standard input and replies on standard output. It
exits at the end of its input, even in the middle of a job.

A job is one frame with a `DecodeJob` and one with the encoded image. An answer is one frame with
a `DecodedImage` and one for each of its arrays (`shared.sandbox.pipe_frames`)."""

from __future__ import annotations

import base64
import binascii
import os
import queue
import resource
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import msgspec

from router.images.opening import ImageRefused, Reason, open_image
from shared.sandbox.memory_limit import MemoryLimit
from shared.sandbox.pipe_frames import read_frame, write_frames
from shared.wire import ArraySpec, Vision

MEMORY_LIMIT_BYTES = 2 * 1024**3
"""Added to what the process uses once the model's processor is loaded."""


class DecodeJob(msgspec.Struct, frozen=True, kw_only=True):
    """An image to prepare, followed by a frame with its content."""

    folder: str  # of the model's processor
    vision: Vision
    max_pixels: int
    is_base64: bool


class DecodedImage(msgspec.Struct, frozen=True, kw_only=True):
    """The prepared image, followed by frames with its arrays, or the reason why there is none."""

    reason: Reason | None = None
    text: str = ""  # why the image is rejected; continues "the image"
    is_fault_of_server: bool = False  # why no image can be prepared for this model
    digest: bytes = b""
    expansion: list[int] = []
    specs: list[ArraySpec] = []
    seconds: float = 0.0
    processor_s: float = 0.0  # used by the process until now


def main() -> None:
    """Prepare images until the input ends."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # libraries may print to stdout
    os.environ["HF_HUB_OFFLINE"] = "1"
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    jobs: queue.SimpleQueue[tuple[DecodeJob, bytes]] = queue.SimpleQueue()
    threading.Thread(target=_serve, args=(jobs, answers), daemon=True).start()
    while True:  # this thread notices the end of the input also while the other one decodes
        job = msgspec.msgpack.decode(read_frame(sys.stdin.buffer), type=DecodeJob)
        jobs.put((job, read_frame(sys.stdin.buffer)))


def _serve(jobs: queue.SimpleQueue[tuple[DecodeJob, bytes]], answers: IO[bytes]) -> None:
    processors = _Processors()
    while True:
        job, content = jobs.get()
        began = time.monotonic()
        frames: Sequence[memoryview] = ()
        try:
            answer, frames = _prepared(processors, job, content, began)
        except ImageRefused as error:
            answer = DecodedImage(reason=error.reason, text=str(error))
        except MemoryError:
            answer = DecodedImage(reason="memory", text="requires too much memory.")
        except _NoProcessor as error:
            answer = DecodedImage(reason="unusable", text=str(error), is_fault_of_server=True)
        except Exception as error:  # a bug: later images may still work
            text = f"could not be prepared ({type(error).__name__})."
            answer = DecodedImage(reason="unusable", text=text)
        answer = msgspec.structs.replace(answer, processor_s=time.process_time())
        write_frames(answers, msgspec.msgpack.encode(answer), *frames)
        del content, frames, answer


class _NoProcessor(Exception):
    """Images cannot be prepared for this model here."""


def _prepared(
    processors: _Processors, job: DecodeJob, content: bytes, began: float
) -> tuple[DecodedImage, Sequence[memoryview]]:
    from router.images.processor import ImageUnusable

    processor = processors.of(job)
    with processors.limit.applied():
        if job.is_base64:
            content = decoded(content)
        image = open_image(content, job.max_pixels)
        try:
            found = processor.prepare(image)
        except ImageUnusable as error:
            if isinstance(error.__cause__, MemoryError):
                raise MemoryError from None
            raise ImageRefused("unusable", f"is not accepted by the model: {error}") from None
    answer = DecodedImage(
        digest=found.digest,
        expansion=found.expansion,
        specs=found.specs,
        seconds=time.monotonic() - began,
    )
    return answer, found.frames


class _Processors:
    """The loaded processors by folder, and the memory limit for images, which excludes what the
    processors use."""

    def __init__(self) -> None:
        self.limit = MemoryLimit(MEMORY_LIMIT_BYTES)
        self._loaded: dict[str, Any] = {}

    def of(self, job: DecodeJob) -> Any:
        """Return the processor for ``job``. Raises `_NoProcessor`."""
        found = self._loaded.get(job.folder)
        if found is None:
            from router.images.processor import ProcessorUnusable, load_processor

            try:
                found = self._loaded[job.folder] = load_processor(Path(job.folder), job.vision)
            except ProcessorUnusable as error:
                raise _NoProcessor(str(error)) from None
            finally:
                self.limit = MemoryLimit(MEMORY_LIMIT_BYTES)
        return found


def decoded(content: bytes) -> bytes:
    """Return the bytes of base64, in either alphabet, padded or not. Raises `ImageRefused`."""
    text = content.translate(_STANDARD, b" \t\r\n").rstrip(b"=")
    try:
        return base64.b64decode(text + b"=" * (-len(text) % 4), validate=True)
    except binascii.Error:
        raise ImageRefused("format", "is not valid base64.") from None


_STANDARD = bytes.maketrans(b"-_", b"+/")


if __name__ == "__main__":
    main()
