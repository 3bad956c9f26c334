"""Prompts for fill-in-the-middle, of any API."""

from __future__ import annotations

from router.errors import NotSupported
from router.fleet.engines.engine import Model
from router.tokens.fim import FimPrompts


def fim_prompts(model: Model, field: str = "suffix") -> FimPrompts:
    """Return what makes the prompts of ``model``. Raises `NotSupported`, which names ``field``, if
    it has none."""
    found = model.renderer.fim
    if found is None:
        # "does not support insert" are Ollama's words.
        raise NotSupported(
            f"'{field}': {model.names[0]} does not support insert: its tokenizer has no tokens for "
            "fill-in-the-middle that this server knows.",
            param=field,
        )
    return found
