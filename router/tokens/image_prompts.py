"""Images in prompts: marks for them in messages, and their tokens in the prompt.

A mark is text, so that it is merged and moved with the surrounding text when a conversation is
adapted to a template. No client can write a mark: it contains a random number that is new for each
prompt.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from router.errors import ContentNotSupported
from router.schemas.images import ModelImage
from router.tokens.tokenization_cache import LengthCheck
from shared.hashing import Picture

_MARK = "\ufdd1"
"""A noncharacter, which does not occur in text."""


class SkipsBos(Protocol):
    """The interface of a renderer."""

    def without_bos(self, text: str, tokens: Sequence[int]) -> Sequence[int]: ...


class PlacedImage(NamedTuple):
    image: ModelImage
    start: int
    """The position of its first token."""

    @property
    def length(self) -> int:
        return len(self.image.expansion)


class Prompt(NamedTuple):
    """The tokens of a prompt, and its images."""

    token_ids: list[int]
    text_token_ids: list[int]
    """The tokens with one token for each image: the tokens of the prompt's text."""
    images: tuple[PlacedImage, ...] = ()
    end_ids: frozenset[int] = frozenset()
    """Tokens that end the answer besides the model's own."""
    is_cut: bool = False
    """Whether text was left out to make it fit."""

    @classmethod
    def of_text(cls, token_ids: list[int]) -> Prompt:
        return cls(token_ids, token_ids)

    def after(self, token_ids: Sequence[int], renderer: SkipsBos) -> Prompt:
        """Return the prompt extended by ``token_ids``, without a BOS token before them."""
        own = renderer.without_bos("", self.token_ids)
        moved = len(token_ids) + len(own) - len(self.token_ids)
        return Prompt(
            [*token_ids, *own],
            [*token_ids, *renderer.without_bos("", self.text_token_ids)],
            tuple(each._replace(start=each.start + moved) for each in self.images),
        )

    @property
    def pictures(self) -> list[Picture]:
        """The images in the format for block hashes."""
        return [Picture(each.start, each.length, each.image.digest) for each in self.images]


class ImageMarks:
    """The marks of the images of one conversation."""

    def __init__(self) -> None:
        self._nonce = secrets.token_hex(8)
        self._pattern = re.compile(f"{_MARK}{self._nonce}:(\\d+){_MARK}")
        self._images: list[ModelImage] = []

    def __len__(self) -> int:
        return len(self._images)

    def add(self, image: ModelImage) -> str:
        """Return the mark of ``image``."""
        self._images.append(image)
        return f"{_MARK}{self._nonce}:{len(self._images) - 1}{_MARK}"

    def images_in(self, messages: Sequence[dict[str, Any]]) -> list[ModelImage]:
        """Return the images whose marks are in ``messages``, in order."""
        return [
            self._images[int(number)]
            for message in messages
            for text in _texts(message["content"])
            for number in self._pattern.findall(text)
        ]

    def replaced(self, content: Any, image_text: str) -> Any:
        """Return a message's ``content`` with ``image_text`` in place of each mark."""
        if isinstance(content, str):
            return self._pattern.sub(lambda _: image_text, content)
        return [
            {**part, "text": self.replaced(part["text"], image_text)} if "text" in part else part
            for part in content
        ]

    def in_parts(self, content: Any) -> Any:
        """Return ``content`` as a list of parts if it has marks, with a part for each image."""
        texts = _texts(content)
        if not any(map(self._pattern.search, texts)):
            return content
        parts: list[dict[str, Any]] = []
        for text in texts:
            for number, piece in enumerate(self._pattern.split(text)):
                if number % 2:
                    parts.append({"type": "image"})
                elif piece:
                    parts.append({"type": "text", "text": piece})
        return parts


def _texts(content: Any) -> list[str]:
    if isinstance(content, str):
        return [content]
    return [part["text"] for part in content if "text" in part]


def expanded(
    token_ids: list[int],
    placeholder_id: int,
    images: Sequence[ModelImage],
    check_length: LengthCheck | None,
) -> Prompt:
    """Return the prompt ``token_ids`` with each placeholder replaced by its image.

    Raises `ContentNotSupported` if the template did not render all ``images``, and what
    ``check_length`` raises.
    """
    if not images:
        return Prompt.of_text(token_ids)
    places = [index for index, token in enumerate(token_ids) if token == placeholder_id]
    if len(places) != len(images):
        raise ContentNotSupported(
            "The model's chat template drops images at these positions: put them into user "
            "messages.",
            param="messages",
        )
    if check_length is not None:
        check_length(len(token_ids) + sum(len(image.expansion) - 1 for image in images))
    found: list[int] = []
    placed: list[PlacedImage] = []
    done = 0
    for place, image in zip(places, images, strict=True):
        found += token_ids[done:place]
        placed.append(PlacedImage(image, len(found)))
        found += image.expansion
        done = place + 1
    found += token_ids[done:]
    return Prompt(found, token_ids, tuple(placed))


class ImageTexts(NamedTuple):
    """How a template shows images."""

    text: str
    """The text of an image between two texts: the placeholder and its surroundings."""
    in_parts: frozenset[str]
    """The roles whose messages support images as parts. For other roles, or a template without
    support for images, the placeholder is written into the message as text."""


def image_texts_of(
    renders: Callable[[list[dict[str, Any]], bool], str], placeholder: str, call: dict[str, Any]
) -> ImageTexts:
    """Return how a template shows images, found by rendering a few. ``call`` is a call of the tool
    that they are rendered with."""
    image, before, after = (
        {"type": "image"},
        {"type": "text", "text": "PROBE-A"},
        {"type": "text", "text": "PROBE-B"},
    )
    shown = [before, image, after]

    def rendered(messages: list[dict[str, Any]], with_tool: bool) -> str:
        try:
            text = renders(messages, with_tool)
        except Exception:  # a template is untrusted code
            return ""
        return text if text.count(placeholder) == 1 and "PROBE-B" in text else ""

    user = rendered([{"role": "user", "content": shown}], False)
    if not user:
        return ImageTexts(placeholder + "\n", frozenset())
    between = user.partition("PROBE-A")[2].partition("PROBE-B")[0]
    roles = {"user"}
    called = [
        {"role": "user", "content": [after]},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "probe", "tool_call_id": call["id"], "content": shown},
    ]
    if rendered(called, True):
        roles.add("tool")
    text = between.strip() if placeholder in between else placeholder
    return ImageTexts(text, frozenset(roles))
