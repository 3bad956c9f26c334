"""Numbers in a model's config.json, for engines, and for routers before its first load."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CONTEXT_KEYS = (
    *("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len"),
    *("max_seq_length", "seq_length", "n_ctx", "model_max_length"),
)


def config_int(config: Mapping[str, Any], key: str) -> int:
    """Return the number under ``key``, in the config itself or in the text part of a multimodal
    config; 0 if there is none."""
    for part in (config, config.get("text_config"), config.get("llm_config")):
        if isinstance(part, Mapping) and isinstance(value := part.get(key), int):
            return value
    return 0


def stated_context(config: Mapping[str, Any]) -> int:
    """Return the context length that ``config`` states, in tokens; 0 if it states none."""
    sizes = (config_int(config, key) for key in CONTEXT_KEYS)
    return next((size for size in sizes if size > 0), 0)
