"""Token ids of texts and pairs of texts for models that embed or rank, cut to a length if asked.

All of this is for the threads of a `WorkPool`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from router.errors import ContextLengthExceeded, NotSupported
from router.tokens.rendering import Renderer


class TokenizedPair(NamedTuple):
    token_ids: list[int]
    second_start: int
    """Where the second text begins, for models that tell it apart; otherwise 0."""


def text_tokens(renderer: Renderer, text: str, limit: int, *, truncate: bool) -> list[int]:
    """Return the tokens of ``text`` with those that the tokenizer puts around: ``limit`` at most.

    A longer text is cut at its end, if ``truncate``. Raises `ContextLengthExceeded`."""
    found = renderer.encode(text)
    if len(found) <= limit:
        return found
    if not truncate:
        raise too_long(len(found), limit)
    inner = renderer.encode(text, add_special_tokens=False)
    before = next((i for i in range(len(found)) if found[i : i + len(inner)] == inner), len(found))
    after = found[before + len(inner) :]
    kept = limit - before - len(after)
    return found[:before] + inner[:kept] + after if kept > 0 else found[:limit]


def pair_tokens(
    renderer: Renderer, first: str, second: str, limit: int, *, truncate: bool
) -> TokenizedPair:
    """Return the tokens of a pair as the tokenizer joins one: ``limit`` at most. Of a longer one
    the second text is cut, if ``truncate``. Raises `ContextLengthExceeded` and `NotSupported`."""

    def join(second: str) -> TokenizedPair:
        return TokenizedPair(*_joined(renderer, first, second))

    return _fitted(renderer, join, second, limit, truncate)


def template_tokens(
    renderer: Renderer, template: str, values: dict[str, str], limit: int, *, truncate: bool
) -> TokenizedPair:
    """Return the tokens of ``template`` filled with ``values``, of which ``document`` is cut if
    need be. Raises `ContextLengthExceeded`."""
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
        f"A text has {count} tokens, over the model's limit of {limit}: shorten it, or ask for it"
        " to be cut with 'truncate'.",
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
                f"The query alone leaves no room within the model's limit of {limit} tokens."
            )
        text = renderer.decode(inner[: len(inner) - over])
        if text.endswith("\N{REPLACEMENT CHARACTER}"):  # a character was cut
            text = text.rstrip("\N{REPLACEMENT CHARACTER}")
        found = join(text)
    return found


def _joined(renderer: Renderer, first: str, second: str) -> tuple[list[int], int]:
    found = renderer.encode_pair(first, second)
    if found is None:
        raise NotSupported("The tokenizer of this model joins no pairs of texts.", param="model")
    ids, kinds = found
    return ids, kinds.index(1) if 1 in kinds else 0
