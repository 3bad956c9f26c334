"""Multimodal checkpoints, and how their parts are loaded.

The language model is mlx-lm's, as for any other checkpoint, so it can be served without mlx-vlm.
The parts that encode pictures are mlx-vlm's (`engine.vision.load`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple


class Family(NamedTuple):
    """A model type for which pictures are supported."""

    placeholder: str
    """The token that stands for a picture in a prompt before it is expanded."""
    text: str = ""
    """mlx-lm's module for the language model, if mlx-lm does not support the whole model. A
    checkpoint may name another of `TEXT_KINDS` in its config."""
    defaults: Mapping[str, Any] = MappingProxyType({})
    """Fields of the language model's config that may be missing, if mlx-lm requires them or has
    other defaults."""
    has_axes: bool = False
    """Whether positions within a picture have three axes. Its tower takes any size of picture."""
    any_size: bool = False
    """Whether a tower without axes takes any size, too, and not only tiles of one size."""
    interleaved: bool = False
    """Whether the pairs of a head take the axes in turn."""
    unscaled: bool = False
    """Whether mlx-lm's language model scales embeddings of pictures, and mlx-vlm's does not."""
    around: str = ""
    """The text that the processor inserts before and after each picture."""


_LLAMA = {"rope_theta": 1e6, "num_hidden_layers": 32, "tie_word_embeddings": False}
_GLM = {
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.5,
    "rope_scaling": None,
    "use_qk_norm": False,
    "tie_word_embeddings": False,
}

FAMILIES = {
    "idefics3": Family("<image>", text="llama", defaults=_LLAMA),
    "smolvlm": Family("<image>", text="llama", defaults=_LLAMA),
    "llava": Family("<image>"),
    "pixtral": Family("[IMG]", any_size=True),
    "mistral3": Family("[IMG]", any_size=True),
    "internvl": Family("<IMG_CONTEXT>", text="qwen3", defaults={"tie_word_embeddings": False}),
    "qwen2_vl": Family("<|image_pad|>", has_axes=True),
    "qwen2_5_vl": Family("<|image_pad|>", has_axes=True),
    "qwen3_vl": Family("<|image_pad|>", has_axes=True, interleaved=True),
    "qwen3_vl_moe": Family("<|image_pad|>", has_axes=True, interleaved=True),
    "qwen3_5": Family("<|image_pad|>", has_axes=True, interleaved=True),
    "qwen3_5_moe": Family("<|image_pad|>", has_axes=True, interleaved=True),
    "glm4v": Family("<|image|>", text="glm4", defaults=_GLM, has_axes=True),
    "glm4v_moe": Family("<|image|>", text="glm4_moe", defaults=_GLM, has_axes=True),
    "gemma3": Family("<start_of_image>", around="\n\n"),
    "gemma4": Family("<|image|>", unscaled=True),
    # mlx-lm's own class for it does not accept attention weights in the checkpoints' format.
    "kimi_vl": Family("<|media_pad|>", text="deepseek_v3"),
}

TEXT_KINDS = ("llama", "mistral", "phi3", "qwen2", "qwen3", "qwen3_moe", "smollm3")
"""Language models that a checkpoint of a family with `Family.text` may contain instead of it."""


def takes_pictures(config: dict[str, Any]) -> bool:
    """Return whether a checkpoint with this ``config`` can encode pictures."""
    return bool(config.get("vision_config"))


def serves_pictures(config: dict[str, Any]) -> bool:
    """Return whether pictures are supported, as far as the model type decides."""
    return takes_pictures(config) and config.get("model_type") in FAMILIES


def deep_layers(config: dict[str, Any]) -> int:
    """Return the number of the language model's first layers to whose outputs features of
    pictures are added."""
    tower = config.get("vision_config")
    found = tower.get("deepstack_visual_indexes") if isinstance(tower, dict) else None
    return len(found) if isinstance(found, list) else 0


def attends_both_ways(config: dict[str, Any]) -> bool:
    """Return whether the tokens of a picture attend to each other in both directions."""
    text = config.get("text_config")
    return isinstance(text, dict) and text.get("use_bidirectional_attention") == "vision"


def text_classes(config: dict[str, Any]) -> Callable[..., tuple[Any, Any]] | None:
    """Return the function that gives mlx-lm's `load_model` the classes of the language model in
    a checkpoint; None if mlx-lm finds them itself."""
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None or not family.text:
        return None

    def classes(config: dict[str, Any]) -> tuple[Any, Any]:
        import importlib

        named = str(config.get("text_config", {}).get("model_type"))
        # mlx-lm uses its Llama module for Mistral models.
        kind = named.replace("mistral", "llama") if named in TEXT_KINDS else family.text
        module = importlib.import_module(f"mlx_lm.models.{kind}")
        args_class = _TextArgs(module.ModelArgs, family.defaults)
        return lambda args: _with_names(module.Model(args)), args_class

    return classes


class _TextArgs:
    """Creates the arguments of the language model from the config of the whole checkpoint."""

    def __init__(self, args_class: Any, defaults: Mapping[str, Any]) -> None:
        self._args_class, self._defaults = args_class, defaults

    def from_dict(self, config: dict[str, Any]) -> Any:
        given = config["text_config"]
        # Newer configs have all rotation parameters in one place.
        rope = given.get("rope_parameters") or {}
        moved = {name: value for name, value in rope.items() if given.get(name) is None}
        text = {**self._defaults, **given, **moved}
        if heads := text.get("num_attention_heads"):
            text.setdefault("num_key_value_heads", heads)
            text.setdefault("head_dim", text.get("hidden_size", 0) // heads)
        for name in ("quantization", "quantization_config"):
            if isinstance(found := config.get(name), dict):  # some layers have their own
                config[name] = {_text_name(key) or key: value for key, value in found.items()}
        return self._args_class.from_dict(text)


def _with_names(model: Any) -> Any:
    """Return ``model``, changed to select its own weights from the whole checkpoint's."""
    of_text = getattr(model, "sanitize", lambda weights: weights)

    def sanitize(weights: dict[str, Any]) -> Any:
        named = ((_text_name(name), weight) for name, weight in weights.items())
        return of_text({name: weight for name, weight in named if name})

    model.sanitize = sanitize
    return model


def _text_name(name: str) -> str:
    """Return the language model's name for a weight; empty for weights of other parts."""
    name = name.removeprefix("model.")
    for prefix in ("text_model.", "language_model."):
        if name.startswith(prefix):
            name = name.removeprefix(prefix).removeprefix("model.")
            return name if name.startswith("lm_head.") else f"model.{name}"
    return name if name.startswith("lm_head.") else ""
