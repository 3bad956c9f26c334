"""Images in conversations: as clients send them, and as models process them."""

from __future__ import annotations

from collections.abc import Sequence

from router.schemas.conversation import ContentPart
from shared.wire import ArraySpec


class SentImage(ContentPart, frozen=True, kw_only=True):
    """An image as a client sent it. No client can send this type directly."""

    source: str
    """A URL, or the content in base64."""
    is_url: bool
    path: str
    """The field in the client's request: ``messages[0].content[1]``."""
    media_type: str | None = None

    @property
    def size(self) -> int:
        """The number of characters it takes in the request."""
        return len(self.source)


class ModelImage:
    """An image prepared by a model's processor: its tokens in the prompt, and the arrays for the
    engine. It is immutable, and several requests may share it."""

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
        """The tokens that replace the placeholder's token."""
        self.specs = specs
        self.frames = frames
        """The bytes of the arrays that ``specs`` describes."""
        self.nbytes = sum(len(frame) for frame in frames) + 8 * len(expansion)


class ImageContent(ContentPart, frozen=True, kw_only=True):
    """The part of a message that contains a prepared image."""

    image: ModelImage
