"""How a config says what positions are rotated by.

Since version 5, transformers writes ``rope_parameters``. Most model classes of mlx-lm know only the
names before (``rope_theta``, ``rope_scaling``), and would take their defaults without a word.
"""

from __future__ import annotations

from typing import Any

_INNER = "text_config"
_ALSO_TAKEN = ("partial_rotary_factor", "original_max_position_embeddings")
_PLAIN = ("default", "proportional")
_GLOBAL, _LOCAL = "full_attention", "sliding_attention"


def older_names(config: dict[str, Any]) -> dict[str, Any]:
    """Return what to add to ``config`` so that it says its ``rope_parameters`` by the older names
    too; nothing where it says them already."""
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
        # Several classes of mlx-lm read the older "type" only.
        found["rope_scaling"] = {"type": given["rope_type"], **given}
    found |= {name: given.get(name) for name in _ALSO_TAKEN}
    return {name: value for name, value in found.items() if value and not config.get(name)}


def stretched_context(config: dict[str, Any]) -> int:
    """Return the positions that YaRN stretches a model to, 0 without it. Configs that turn it on
    may keep the ``max_position_embeddings`` of the model itself, as those of Qwen3 do."""
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    if not isinstance(scaling, dict):
        return 0
    kind = scaling.get("rope_type") or scaling.get("type")
    factor, own = scaling.get("factor"), scaling.get("original_max_position_embeddings")
    if kind != "yarn" or not isinstance(factor, int | float) or not isinstance(own, int):
        return 0
    return int(own * factor)
