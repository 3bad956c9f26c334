"""Checkpoints that take pictures beside text, and how their parts are loaded.

The language model is mlx-lm's, as for any other checkpoint, so that it is served without mlx-vlm
too. The parts that encode pictures are mlx-vlm's (`engine.vision.load`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Family(NamedTuple):
    """A model type whose pictures are served."""

    placeholder: str
    """The token that stands for a picture in a prompt before its expansion."""
    text: str = ""
    """mlx-lm's module of the language model, where mlx-lm does not know the whole."""
    has_axes: bool = False
    """Whether positions within a picture have three axes."""
    interleaved: bool = False
    """Whether the pairs of a head turn by the axes in turn."""


FAMILIES = {
    "idefics3": Family("<image>", text="llama"),
    "smolvlm": Family("<image>", text="llama"),
    "llava": Family("<image>"),
    "pixtral": Family("[IMG]"),
    "mistral3": Family("[IMG]"),
    "internvl": Family("<IMG_CONTEXT>", text="qwen3"),
    "qwen2_vl": Family("<|image_pad|>", has_axes=True),
    "qwen2_5_vl": Family("<|image_pad|>", has_axes=True),
    "qwen3_vl": Family("<|image_pad|>", has_axes=True, interleaved=True),
    "qwen3_vl_moe": Family("<|image_pad|>", has_axes=True, interleaved=True),
}

_DEFAULTS = {"rope_theta": 1e6, "num_hidden_layers": 32, "tie_word_embeddings": False}
"""Of the text part of an Idefics 3, where they are not mlx-lm's."""


def takes_pictures(config: dict[str, Any]) -> bool:
    """Return whether the checkpoint with this ``config`` has parts that encode pictures."""
    return bool(config.get("vision_config"))


def deep_layers(config: dict[str, Any]) -> int:
    """Return how many of the language model's first layers have features of pictures added to their
    outputs."""
    tower = config.get("vision_config")
    found = tower.get("deepstack_visual_indexes") if isinstance(tower, dict) else None
    return len(found) if isinstance(found, list) else 0


def text_classes(config: dict[str, Any]) -> Callable[..., tuple[Any, Any]] | None:
    """Return the function that tells mlx-lm's `load_model` the classes of the language model in a
    checkpoint; None where mlx-lm knows them itself."""
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None or not family.text:
        return None

    def classes(config: dict[str, Any]) -> tuple[Any, Any]:
        import importlib

        module = importlib.import_module(f"mlx_lm.models.{family.text}")
        return lambda args: _with_names(module.Model(args)), _TextArgs(module.ModelArgs)

    return classes


class _TextArgs:
    """Makes the arguments of the language model from the whole checkpoint's configuration."""

    def __init__(self, args_class: Any) -> None:
        self._args_class = args_class

    def from_dict(self, config: dict[str, Any]) -> Any:
        text = _DEFAULTS | config["text_config"]
        text.setdefault("num_key_value_heads", text.get("num_attention_heads"))
        for name in ("quantization", "quantization_config"):
            if isinstance(found := config.get(name), dict):  # of some layers it says its own
                config[name] = {_text_name(key) or key: value for key, value in found.items()}
        return self._args_class.from_dict(text)


def _with_names(model: Any) -> Any:
    """Return ``model``, which picks its own weights out of the whole checkpoint's."""
    of_text = model.sanitize

    def sanitize(weights: dict[str, Any]) -> Any:
        named = ((_text_name(name), weight) for name, weight in weights.items())
        return of_text({name: weight for name, weight in named if name})

    model.sanitize = sanitize
    return model


def _text_name(name: str) -> str:
    """Return what a weight of the language model is called there; empty for another weight."""
    name = name.removeprefix("model.")
    for prefix in ("text_model.", "language_model."):
        if name.startswith(prefix):
            name = name.removeprefix(prefix).removeprefix("model.")
            return name if name.startswith("lm_head.") else f"model.{name}"
    return name if name.startswith("lm_head.") else ""
