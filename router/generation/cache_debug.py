"""Why a prompt missed the prefix cache, for clients that ask (`x-debug-cache: 1`)."""

from __future__ import annotations

import json

from router.generation.generation import Generation

_BEFORE_TOKENS = 12


def explain(generation: Generation) -> bytes:
    """Return ASCII JSON that compares the prompt with the closest earlier one, including its
    answer.

    Earlier prompts have the same API key and ``cache_salt``. ``differs_at`` is null if the prompt
    begins with all tokens of the earlier one, so that all of its blocks can be reused.

    Without a ``cache_salt``, the earlier prompt may be another person's, because several people may
    share a key. Its text is then not shown, and positions are rounded to blocks: exact positions
    would allow guessing the text token by token.
    """
    model = generation.model
    vocabulary, block_size = model.renderer.vocabulary, model.hello.block_size
    prompt = generation.choices[0].prompt.text_token_ids
    found = model.renderer.compare(generation.cache_scope, prompt)
    private = generation.has_cache_salt

    def rounded(tokens: int) -> int:
        return tokens if private else tokens // block_size * block_size

    def named(token: int | None) -> dict[str, object] | None:
        if token is None or not private:
            return None
        return {"id": token, "text": vocabulary.token_text(token)}

    differs_at = None
    if found.earlier_token is not None:
        place = rounded(found.common_tokens)
        differs_at = {
            "token": place,
            "block": place // block_size,
            "before": vocabulary.decode(prompt[max(0, place - _BEFORE_TOKENS) : place]),
            "earlier": named(found.earlier_token),
            "now": named(found.token),
        }
    return json.dumps(
        {
            "prompt_tokens": len(prompt),
            "earlier_tokens": rounded(found.earlier_tokens),
            "same_tokens": rounded(found.common_tokens),
            "same_blocks": found.common_tokens // block_size,
            "kept_tokens": rounded(found.reused_tokens),
            "differs_at": differs_at,
        }
    ).encode()
