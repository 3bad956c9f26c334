"""The context length: the max length of a model's sequences, in tokens."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from engine.model.rotation import stretched_context
from shared.model_config import CONTEXT_KEYS, config_int, stated_context

logger = logging.getLogger(__name__)

DEFAULT_CONTEXT_LENGTH = 32_768
"""For models whose config has no context length (recurrent ones)."""


def context_length(config: dict[str, Any], model: Any = None) -> int:
    """Return the max length of sequences that a model with ``config`` supports: YaRN counts unless
    ``model`` has no module for it."""
    size = stated_context(config) or _usual_context(config)
    inner = config.get("text_config")
    parts = (config, inner if isinstance(inner, dict) else {})
    own, stretched = size or DEFAULT_CONTEXT_LENGTH, max(map(stretched_context, parts))
    if stretched > own and model is not None:
        modules = (type(module).__name__.lower() for _, module in model.named_modules())
        if not any("yarn" in name for name in modules):
            ignored = "mlx-lm ignores this model's rope_scaling: %d tokens are its context"
            logger.warning(ignored, own)
            return own
    return max(own, stretched)


def _usual_context(config: dict[str, Any]) -> int:
    """Return transformers' default for a config without a context length, such as that of Gemma
    3 4B; 0 if it has none."""
    from transformers import AutoConfig

    try:
        known = AutoConfig.for_model(config["model_type"]).get_text_config()
    except Exception:  # code for other models: whatever it raises, it does not support this one
        return 0
    return config_int(vars(known), CONTEXT_KEYS[0])


def served_context(model: Any, own: int, max_kv_size: int | None) -> int:
    """Return the max length of sequences to serve, for a model with a context length of ``own``.

    ``max_kv_size`` limits it, unless the model never keeps more positions than that."""
    if max_kv_size is None or max_kv_size >= own or max_cached_positions(model) <= max_kv_size:
        return own
    return max_kv_size


def max_cached_positions(model: Any) -> float:
    """Return the max number of positions that the model's own caches keep per sequence.

    That is its longest window, 0 with recurrent state only, and infinity if unbounded."""
    from mlx_lm.models.cache import make_prompt_cache

    return _kept(make_prompt_cache(model))


def vocabulary_size(model: Any, config: dict[str, Any]) -> int:
    """Return the width of the logits of ``model``, 0 if unknown.

    The arguments of the model object come first: they include the defaults of its class for
    fields missing in ``config``, such as in that of Gemma 3 4B."""
    args = getattr(model, "args", None)
    for part in (getattr(args, "text_config", None), args):
        fields = part if isinstance(part, dict) else getattr(part, "__dict__", {})
        if size := config_int(fields, "vocab_size"):
            return size
    return config_int(config, "vocab_size")


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
