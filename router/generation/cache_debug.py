"""Why a prompt was not found in the cache, for clients that ask (`x-debug-cache: 1`)."""

from __future__ import annotations

import json

from router.generation.generation import Generation

_BEFORE_TOKENS = 12


async def explain(generation: Generation) -> bytes:
    """Return ASCII JSON that compares the prompt with the closest earlier one, reply included.

    Earlier prompts are those of the same API key and ``cache_salt``. ``differs_at`` is null if the
    prompt begins with all tokens of the earlier one, so that all of its blocks can be used.
    """
    model = generation.model
    vocabulary, block_size = model.renderer.vocabulary, model.hello.block_size
    prompt = generation.choices[0].sequence.submit.token_ids
    found = await model.renderer.compare(generation.cache_scope, prompt)

    def named(token: int | None) -> dict[str, object] | None:
        return None if token is None else {"id": token, "text": vocabulary.token_text(token)}

    differs_at = None
    if found.earlier_token is not None:
        before = prompt[max(0, found.common_tokens - _BEFORE_TOKENS) : found.common_tokens]
        differs_at = {
            "token": found.common_tokens,
            "block": found.common_tokens // block_size,
            "before": vocabulary.decode(before),
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
