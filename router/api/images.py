"""Preparation of a conversation's images for the model that answers it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from msgspec.structs import replace
from starlette.datastructures import State

from router.api.body import held_memory
from router.api.translation import content_note
from router.fleet.engines.engine import Model
from router.fleet.router import Router
from router.fleet.tenants.tenant import Tenant
from router.schemas.conversation import ChatMessage, ContentPart, unsupported_content
from router.schemas.images import ImageContent, ModelImage, SentImage


async def with_images(
    router: Router,
    messages: Sequence[ChatMessage],
    model: Model,
    state: State,
    scope: str,
    size: int,
) -> tuple[list[ChatMessage], int]:
    """Return ``messages``, from a body of ``size`` bytes, with their images prepared for ``model``,
    and the number of bytes without them.

    If the model accepts no images and `--skip-unsupported-content` is set, each image is replaced
    with a note. Images are shared within ``scope``; ``state`` belongs to the request. Raises
    `ApiError`.
    """
    tenant: Tenant = state.tenant
    # No more than needed: this runs on the event loop, and a body may have very many.
    images = list(islice(_images(messages), router.settings.max_images + 1))
    if not images:
        return list(messages), size
    processor = model.image_processor
    if processor is None:
        if not router.settings.skip_unsupported_content:
            raise unsupported_content(images[0].type, images[0].path)
        return await router.work.run_large(tenant.share, lambda: _with_notes(messages, size), size)
    held = held_memory(router, state)
    prepared = await router.images.prepare(images, processor, tenant.share, scope, held)
    size -= sum(image.size for image in images)
    return _replaced(messages, (_content(image) for image in prepared)), size


def _with_notes(messages: Sequence[ChatMessage], size: int) -> tuple[list[ChatMessage], int]:
    images = list(_images(messages))
    notes = (ContentPart("text", content_note(image.type)) for image in images)
    return _replaced(messages, notes), size - sum(image.size for image in images)


def _content(image: ModelImage) -> ImageContent:
    return ImageContent(type="image", image=image)


def _images(messages: Sequence[ChatMessage]) -> Iterator[SentImage]:
    for message in messages:
        if isinstance(message.content, list):
            yield from (part for part in message.content if isinstance(part, SentImage))


def _replaced(
    messages: Sequence[ChatMessage], contents: Iterable[ContentPart]
) -> list[ChatMessage]:
    """Return ``messages`` with each image replaced by the next of ``contents``. Messages without
    images are not copied: this runs on the event loop, and there may be many."""
    following = iter(contents)
    found = list(messages)
    for index, message in enumerate(found):
        content = message.content
        if isinstance(content, list) and any(isinstance(part, SentImage) for part in content):
            parts = [next(following) if isinstance(part, SentImage) else part for part in content]
            found[index] = replace(message, content=parts)
    return found
