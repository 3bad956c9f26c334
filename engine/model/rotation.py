"""The rotation parameters of a config.

Since version 5, transformers writes ``rope_parameters``. Most model classes of mlx-lm support
only the older names (``rope_theta``, ``rope_scaling``), and would silently use their defaults."""

from __future__ import annotations

from typing import Any

_INNER = "text_config"
_ALSO_TAKEN = ("partial_rotary_factor", "original_max_position_embeddings")
_PLAIN = ("default", "proportional")
_GLOBAL, _LOCAL = "full_attention", "sliding_attention"


def older_names(config: dict[str, Any]) -> dict[str, Any]:
    """Return the fields to add to ``config`` so that its ``rope_parameters`` are also found
    under the older names; empty if they already are."""
    added = _older_names(config)
    inner = config.get(_INNER)
    if isinstance(inner, dict) and (more := _older_names(inner)):
        added[_INNER] = {**inner, **more}
    return added


def _older_names(config: dict[str, Any]) -> dict[str, Any]:
    given = config.get("rope_parameters")
    if not isinstance(given, dict):
        return {}
    found: dict[str, Any] = {}
    if isinstance(local := given.get(_LOCAL), dict):
        found["rope_local_base_freq"] = local.get("rope_theta")
    if isinstance(given.get(_GLOBAL), dict):
        given = given[_GLOBAL]
    found["rope_theta"] = given.get("rope_theta")
    if given.get("rope_type", "default") not in _PLAIN:
        # Several classes of mlx-lm read only the older "type".
        found["rope_scaling"] = {"type": given["rope_type"], **given}
    found |= {name: given.get(name) for name in _ALSO_TAKEN}
    return {name: value for name, value in found.items() if value and not config.get(name)}


def stretched_context(config: dict[str, Any]) -> int:
    """Return the context length to which YaRN extends a model, 0 without YaRN. Configs that
    enable it may keep the original ``max_position_embeddings``, as Qwen3's do."""
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    if not isinstance(scaling, dict):
        return 0
    kind = scaling.get("rope_type") or scaling.get("type")
    factor, own = scaling.get("factor"), scaling.get("original_max_position_embeddings")
    if kind != "yarn" or not isinstance(factor, int | float) or not isinstance(own, int):
        return 0
    return int(own * factor)
