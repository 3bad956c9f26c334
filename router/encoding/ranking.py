"""Scores of pairs of texts: the shared part of the reranking and scoring endpoints."""

from __future__ import annotations

from collections.abc import Sequence

from router.encoding.encoding import Caller, EncodedTexts, encode
from router.errors import ContextLengthExceeded, InvalidRequest
from router.fleet.engines.engine import Model
from router.fleet.router import Router
from router.tokens.text_tokens import (
    TokenizedPair,
    pair_tokens,
    template_tokens,
)
from shared.wire import TextTask

MAX_REPEATED_TOKENS = 1_000_000
"""Limit on the total tokens of the first texts and instructions of all pairs."""


async def score_pairs(
    router: Router,
    model: Model,
    caller: Caller,
    pairs: Sequence[tuple[str, str]],
    *,
    fields: tuple[str, str],
    instruction: str | None = None,
    max_tokens: int | None = None,
    truncate: bool,
    size: int,
) -> EncodedTexts:
    """Return for each of ``pairs`` how well the second text answers the first, from 0 to 1.

    A pair over the model's limit or over ``max_tokens`` has its second text truncated if
    ``truncate`` is set, and is rejected otherwise. ``size`` is the size of the request body, and
    ``fields`` the names of the first and the second texts in it. Call it within `Router.admit`.
    Raises `ApiError`.
    """
    task = model.hello.text_task or TextTask()
    if instruction is not None and not task.pair_template:
        raise InvalidRequest("This model does not support instructions.", param="instruction")
    limit = model.max_prompt_tokens
    limit = min(limit, max_tokens or limit)

    def prepare() -> list[TokenizedPair]:
        firsts = [first for first, _ in pairs]
        _check_repeated(model, firsts, instruction or "", limit, fields[0])
        found = []
        for number, (first, second) in enumerate(pairs):
            try:
                found.append(_tokens(model, task, first, second, instruction, limit, truncate))
            except InvalidRequest as error:
                error.param = error.param or f"{fields[1]}[{number}]"
                raise
        return found

    return await encode(router, model, caller, prepare, size)


def _check_repeated(
    model: Model, firsts: Sequence[str], instruction: str, limit: int, field: str
) -> None:
    """Raise `InvalidRequest` if the ``instruction`` or one of the ``firsts`` is too long, or if
    their total over all pairs is: they are tokenized and computed again for each document."""
    lengths: dict[str, int] = {}
    for text in filter(None, {*firsts, instruction}):
        lengths[text] = len(model.renderer.encode(text))
        if lengths[text] > limit:
            name = "instruction" if text == instruction else field
            raise ContextLengthExceeded(
                f"'{name}' has {lengths[text]} tokens; the limit is {limit}. It is not truncated.",
                param=name,
            )
    total = sum(lengths.get(text, 0) for text in firsts)
    total += lengths.get(instruction, 0) * len(firsts)
    if total > MAX_REPEATED_TOKENS:
        raise InvalidRequest(
            f"Query and instruction, repeated for every document, have {total} tokens; the limit "
            f"is {MAX_REPEATED_TOKENS}. Shorten them, or send fewer documents.",
            code="request_too_large",
        )


def _tokens(
    model: Model,
    task: TextTask,
    first: str,
    second: str,
    instruction: str | None,
    limit: int,
    truncate: bool,
) -> TokenizedPair:
    if not task.pair_template:
        return pair_tokens(model.renderer, first, second, limit, truncate=truncate)
    values = {
        "instruction": task.instruction if instruction is None else instruction,
        "query": first,
        "document": second,
    }
    return template_tokens(model.renderer, task.pair_template, values, limit, truncate=truncate)
