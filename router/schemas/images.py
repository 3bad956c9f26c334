"""Images in conversations: as clients send them, and as models take them."""

from __future__ import annotations

from collections.abc import Sequence

from router.schemas.conversation import ContentPart
from shared.wire import ArraySpec


class SentImage(ContentPart, frozen=True, kw_only=True):
    """An image as a client sent it. No client can send this type itself."""

    source: str
    """A URL, or the content in base64."""
    is_url: bool
    path: str
    """The field in the client's request: ``messages[0].content[1]``."""
    media_type: str | None = None

    @property
    def size(self) -> int:
        """The characters that it takes in the request."""
        return len(self.source)


class ModelImage:
    """An image as the processor of a model made it: what stands for it in the prompt, and what the
    engine takes. It does not change, and many requests may have it."""

    __slots__ = ("digest", "expansion", "frames", "nbytes", "specs")

    def __init__(
        self,
        digest: bytes,
        expansion: Sequence[int],
        specs: Sequence[ArraySpec],
        frames: Sequence[bytes | memoryview],
    ) -> None:
        self.digest = digest
        """Equal digests mean equal arrays."""
        self.expansion = expansion
        """The tokens that replace the one of the placeholder."""
        self.specs = specs
        self.frames = frames
        """The bytes of the arrays that ``specs`` describe."""
        self.nbytes = sum(len(frame) for frame in frames) + 8 * len(expansion)


class ImageContent(ContentPart, frozen=True, kw_only=True):
    """The part of a message in which an image is that has been prepared."""

    image: ModelImage
