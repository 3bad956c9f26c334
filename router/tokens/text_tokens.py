"""Token ids of texts and pairs of texts for embedding and reranking models, truncated on request.

All functions are meant for the threads of a `WorkPool`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from router.errors import ContextLengthExceeded, NotSupported
from router.tokens.rendering import Renderer


class TokenizedPair(NamedTuple):
    token_ids: list[int]
    second_start: int
    """The start of the second text, for models that distinguish it; otherwise 0."""


def text_tokens(renderer: Renderer, text: str, limit: int, *, truncate: bool) -> list[int]:
    """Return the tokens of ``text`` with the special tokens that the tokenizer adds, at most
    ``limit``.

    A longer text is truncated at its end if ``truncate`` is set. Raises `ContextLengthExceeded`."""
    found = renderer.encode(text)
    if len(found) <= limit:
        return found
    if not truncate:
        raise too_long(len(found), limit)
    inner = renderer.encode(text, add_special_tokens=False)
    added = max(0, len(found) - len(inner))  # all other places are too late; each is a long copy
    before = next((i for i in range(added + 1) if found[i : i + len(inner)] == inner), len(found))
    after = found[before + len(inner) :]
    kept = limit - before - len(after)
    return found[:before] + inner[:kept] + after if kept > 0 else found[:limit]


def pair_tokens(
    renderer: Renderer, first: str, second: str, limit: int, *, truncate: bool
) -> TokenizedPair:
    """Return the tokens of a pair joined by the tokenizer, at most ``limit``. If it is longer, the
    second text is truncated if ``truncate`` is set. Raises `ContextLengthExceeded` and
    `NotSupported`."""

    def join(second: str) -> TokenizedPair:
        return TokenizedPair(*_joined(renderer, first, second))

    return _fitted(renderer, join, second, limit, truncate)


def template_tokens(
    renderer: Renderer, template: str, values: dict[str, str], limit: int, *, truncate: bool
) -> TokenizedPair:
    """Return the tokens of ``template`` filled with ``values``. If it is too long, ``document`` is
    truncated. Raises `ContextLengthExceeded`."""
    before, after = template.split("{document}")
    for name, value in values.items():
        if name != "document":
            before, after = (part.replace(f"{{{name}}}", value) for part in (before, after))

    def fill(document: str) -> TokenizedPair:
        text = before + document + after
        return TokenizedPair(renderer.encode(text, add_special_tokens=False), 0)

    return _fitted(renderer, fill, values["document"], limit, truncate)


def too_long(count: int, limit: int) -> ContextLengthExceeded:
    return ContextLengthExceeded(
        f"A text has {count} tokens; the model's limit is {limit}. Shorten it, or set 'truncate'.",
    )


def _fitted(
    renderer: Renderer,
    join: Callable[[str], TokenizedPair],
    text: str,
    limit: int,
    truncate: bool,
) -> TokenizedPair:
    found = join(text)
    if len(found.token_ids) > limit and not truncate:
        raise too_long(len(found.token_ids), limit)
    while (over := len(found.token_ids) - limit) > 0:
        inner = renderer.encode(text, add_special_tokens=False)
        if over >= len(inner):
            raise ContextLengthExceeded(
                f"The query leaves no room for a document within the model's limit of {limit} "
                "tokens."
            )
        text = renderer.decode(inner[: len(inner) - over])
        if text.endswith("\N{REPLACEMENT CHARACTER}"):  # a character was cut in two
            text = text.rstrip("\N{REPLACEMENT CHARACTER}")
        found = join(text)
    return found


def _joined(renderer: Renderer, first: str, second: str) -> tuple[list[int], int]:
    found = renderer.encode_pair(first, second)
    if found is None:
        raise NotSupported("This model's tokenizer does not support pairs of texts.", param="model")
    ids, kinds = found
    return ids, kinds.index(1) if 1 in kinds else 0
