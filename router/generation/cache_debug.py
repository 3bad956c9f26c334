"""Why a prompt was not found in the cache, for the client that asks (`x-debug-cache: 1`)."""

from __future__ import annotations

import json

from router.generation.generation import Generation

_BEFORE_TOKENS = 12


async def explain(generation: Generation) -> bytes:
    """JSON in ASCII: the prompt beside the closest earlier one of the same API key and
    ``cache_salt``, up to where its reply ended. ``differs_at`` is null where all of that one's
    tokens are at the beginning of this one, so that all of its blocks can be used."""
    model = generation.model
    assert model.renderer is not None
    renderer, prompt = model.renderer, list(generation.prompts[0])
    found = await renderer.compare(generation.cache_scope, prompt)
    block_size = model.hello.block_size

    def named(token: int | None) -> dict[str, object] | None:
        return (
            None if token is None else {"id": token, "text": renderer.vocabulary.token_text(token)}
        )

    differs_at = None
    if found.earlier_token is not None:
        before = prompt[max(0, found.common_tokens - _BEFORE_TOKENS) : found.common_tokens]
        differs_at = {
            "token": found.common_tokens,
            "block": found.common_tokens // block_size,
            "before": renderer.vocabulary.decode(before),
            "earlier": named(found.earlier_token),
            "now": named(found.token),
        }
    return json.dumps(
        {
            "prompt_tokens": len(prompt),
            "earlier_tokens": found.earlier_tokens,
            "same_tokens": found.common_tokens,
            "same_blocks": found.common_tokens // block_size,
            "kept_tokens": found.reused_tokens,
            "differs_at": differs_at,
        }
    ).encode()
