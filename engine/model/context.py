"""How long sequences of a model may be."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

DEFAULT_CONTEXT_LENGTH = 32_768
"""The context length of models whose config names none (recurrent ones), in tokens."""

_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_sequence_length",
    "max_seq_len",
    "max_seq_length",
    "seq_length",
    "n_ctx",
    "model_max_length",
)


def context_length(config: dict[str, Any]) -> int:
    """The longest sequence, in tokens, that a model with ``config`` was made for."""
    return next(
        (size for key in _KEYS if (size := config_int(config, key)) > 0), DEFAULT_CONTEXT_LENGTH
    )


def served_context(model: Any, own: int, max_kv_size: int | None) -> int:
    """The longest sequence to be served, of a model whose ``own`` longest that is. Who keeps
    no more than ``max_kv_size`` positions anyway needs no other limit."""
    if max_kv_size is None or max_kv_size >= own or max_cached_positions(model) <= max_kv_size:
        return own
    return max_kv_size


def max_cached_positions(model: Any) -> float:
    """How many positions of a sequence the model's own caches keep at most: its longest
    window, 0 where all it keeps is recurrent state, infinity where it keeps all."""
    from mlx_lm.models.cache import make_prompt_cache

    return _kept(make_prompt_cache(model))


def config_int(config: dict[str, Any], key: str) -> int:
    """The number under ``key``, there or in the part for text of a multimodal config; or 0."""
    for part in (config, config.get("text_config"), config.get("llm_config")):
        if isinstance(part, dict) and isinstance(value := part.get(key), int):
            return value
    return 0


def _kept(caches: Iterable[Any]) -> float:
    from mlx_lm.models.cache import ArraysCache, CacheList, RotatingKVCache

    most = 0.0
    for cache in caches:
        if isinstance(cache, CacheList):
            most = max(most, _kept(cache.caches))
        elif isinstance(cache, RotatingKVCache):
            most = max(most, cache.max_size)
        elif not isinstance(cache, ArraysCache):
            return float("inf")
    return most
