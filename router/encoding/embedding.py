"""Vectors of texts: the shared part of `/v1/embeddings` and the other APIs' endpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from router.encoding.encoding import Caller, EncodedTexts, encode
from router.errors import InvalidRequest, InvalidValue
from router.fleet.engines.engine import Model
from router.fleet.router import Router
from router.fleet.sequences.remote_texts import Rows
from router.fleet.tasks import check_task, default_model
from router.tokens.text_tokens import TokenizedPair, text_tokens, too_long
from shared.wire import Task, TextTask

MAX_TEXTS = 2048
"""OpenAI's limit for one request."""


async def text_model(router: Router, name: str | None, caller: Caller, task: Task) -> Model:
    """Return the loaded model called ``name`` if it is for ``task``; without a name, the first such
    model that the caller may use. Raises `ApiError`."""
    name = default_model(task, router, caller.tenant) if name is None else name
    model = await router.loaded_model(name, caller.tenant)
    check_task(model, task, router, caller.tenant)
    return model


async def embed_texts(
    router: Router,
    model: Model,
    caller: Caller,
    texts: Sequence[str | list[int]],
    *,
    name_of: Callable[[int], str],
    prompt_name: str | None = None,
    dimensions: int | None = None,
    truncate: bool = False,
    size: int,
) -> EncodedTexts:
    """Return a vector for each of ``texts``, which are given as text or as token ids. Token ids are
    used as they are, without a prompt.

    ``dimensions`` keeps the first elements of each vector and normalizes it to length 1 again. A
    text over the model's limit is truncated if ``truncate`` is set and rejected otherwise. ``size``
    is the size of the request body, and ``name_of`` returns the name of each text in it, for
    errors. Call it within `Router.admit`. Raises `ApiError`."""
    task = model.hello.text_task or TextTask()
    if dimensions is not None and dimensions > task.dimensions:
        raise InvalidValue(
            f"'dimensions' must be at most {task.dimensions}, the size of this model's vectors.",
            param="dimensions",
        )
    prompt = _prompt(task, prompt_name)
    if prompt_name is not None and not all(isinstance(text, str) for text in texts):
        raise InvalidRequest("'prompt_name' cannot be used with token ids.", param="prompt_name")

    def prepare() -> list[TokenizedPair]:
        found = []
        for number, text in enumerate(texts):
            try:
                found.append(TokenizedPair(_tokens(model, text, prompt, truncate), 0))
            except InvalidRequest as error:
                error.param = name_of(number)
                raise
        return found

    encoded = await encode(router, model, caller, prepare, size)
    if dimensions is None or dimensions == task.dimensions:
        return encoded
    rows = await router.work.run(
        caller.tenant.share, lambda: shortened(encoded.rows, dimensions), encoded.rows.size
    )
    return EncodedTexts(rows=rows, num_tokens=encoded.num_tokens)


def numbered(field: str, number: int, count: int) -> str:
    """Return the name of one of the ``count`` texts of ``field``, for errors."""
    return field if count == 1 else f"{field}[{number}]"


def shortened(rows: Rows, dimensions: int) -> Rows:
    """Return the first ``dimensions`` of each row, normalized to length 1."""
    cut = rows[:, :dimensions]
    lengths = np.linalg.norm(cut, axis=1, keepdims=True)
    return np.asarray(cut / np.where(lengths > 0, lengths, 1), np.float32)


def _prompt(task: TextTask, name: str | None) -> str:
    if name is None:
        return task.prompts.get(task.default_prompt or "", "")
    if name not in task.prompts:
        known = ", ".join(task.prompts) or "none"
        raise InvalidValue(
            f"'prompt_name' must be one of this model's prompts: {known}.", param="prompt_name"
        )
    return task.prompts[name]


def _tokens(model: Model, text: str | list[int], prompt: str, truncate: bool) -> list[int]:
    limit = model.max_prompt_tokens
    if isinstance(text, str):
        found = text_tokens(model.renderer, prompt + text, limit, truncate=truncate)
        if not found:
            raise InvalidValue("The text has no tokens.")
        return found
    most = model.hello.vocab_size - 1
    if not text or max(text) > most:
        raise InvalidValue(
            f"A list of token ids must not be empty, and ids must be between 0 and {most}."
        )
    if len(text) > limit and not truncate:
        raise too_long(len(text), limit)
    return text[:limit]
