"""Encoders: BERT, RoBERTa and XLM-RoBERTa, ModernBERT, nomic-bert. Their configs and
weights, and what they read.

They differ in the position of norms, in positions, MLPs and names of weights, so one description
covers all of them, with one implementation per device.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from engine.model.errors import ModelUnavailable

if TYPE_CHECKING:
    import mlx.core as mx

Activation = Literal["gelu", "gelu_tanh", "relu", "silu"]
_ACTIVATIONS: Mapping[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swiglu": "silu",
    "geglu": "gelu",
}
_RENAMES = (
    (r"^(bert|roberta|model)\.", ""),
    (r"^embeddings\.(word_embeddings|tok_embeddings)\.", "word."),
    (r"^embeddings\.position_embeddings\.", "position."),
    (r"^embeddings\.token_type_embeddings\.", "type."),
    (r"^(embeddings\.(LayerNorm|norm)|emb_ln)\.", "embed_norm."),
    (r"^encoder\.layers?\.", "layers."),
    (r"\.(attention\.self\.query|self_attn\.q_proj)\.", ".q."),
    (r"\.(attention\.self\.key|self_attn\.k_proj)\.", ".k."),
    (r"\.(attention\.self\.value|self_attn\.v_proj)\.", ".v."),
    (r"\.attn\.Wqkv\.", ".qkv."),
    (r"\.(attention\.output\.dense|attn\.out_proj|attn\.Wo|self_attn\.o_proj)\.", ".out."),
    (r"\.(attention\.output\.LayerNorm|norm1|post_attention_layernorm)\.", ".attn_norm."),
    (r"\.(intermediate\.dense|mlp\.fc11|mlp\.up_proj)\.", ".up."),
    (r"\.(mlp\.fc12|mlp\.gate_proj)\.", ".gate."),
    (r"\.mlp\.Wi\.", ".gate_up."),
    (r"\.(output\.dense|mlp\.fc2|mlp\.down_proj|mlp\.Wo)\.", ".down."),
    (r"\.(output\.LayerNorm|norm2|post_mlp_layernorm)\.", ".mlp_norm."),
    (r"\.gamma$", ".weight"),
    (r"\.beta$", ".bias"),
)
"""The names of all families, mapped to one."""


@dataclass(frozen=True)
class Text:
    """Everything on which a row of an encoder's answer depends, or of an embedding decoder's."""

    token_ids: tuple[int, ...]
    second_start: int = 0  # where the second text of a pair begins; 0: not a pair

    def __len__(self) -> int:
        return len(self.token_ids)


class Affine(NamedTuple):
    """A linear layer or a norm."""

    weight: mx.array
    bias: mx.array | None


@dataclass(frozen=True, kw_only=True)
class EncoderLayer:
    """The weights of one layer."""

    qkv: Affine
    out: Affine
    attn_norm: Affine | None  # before attention in a pre-norm model, otherwise after it
    up: Affine  # with a gated MLP, the rows of the gate first
    down: Affine
    mlp_norm: Affine
    rope_theta: float | None  # None: no rotary positions
    reach: int | None  # max distance between two tokens that see each other; None: any


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """A loaded encoder."""

    word: mx.array
    position: mx.array | None  # learned positions
    first_position: int
    type: mx.array | None
    embed_norm: Affine
    layers: tuple[EncoderLayer, ...]
    final_norm: Affine | None
    rest: Mapping[str, mx.array]  # of a head, by the checkpoint's names
    heads: int
    eps: float
    activation: Activation
    gated: bool
    pre_norm: bool

    @property
    def hidden(self) -> int:
        return int(self.word.shape[1])


def load_encoder(path: Path, config: Mapping[str, Any], dtype: mx.Dtype | None) -> Encoder:
    """Load the encoder in ``path``, with weights in ``dtype`` (None: unchanged).

    Raises `ModelUnavailable` for unsupported models, and for missing weights."""
    import mlx.core as mx

    weights: dict[str, mx.array] = {}
    for file in sorted(path.glob("model*.safetensors")):
        loaded = mx.load(str(file))
        assert isinstance(loaded, dict)
        weights |= loaded
    weights = {_renamed(name): w for name, w in _dequantized(weights, config).items()}
    if dtype is not None:
        weights = {
            name: w.astype(dtype) if mx.issubdtype(w.dtype, mx.floating) else w
            for name, w in weights.items()
        }
    try:
        encoder = _assemble(weights, config)
    except KeyError as error:
        raise ModelUnavailable(
            f"cannot load the model in {path}: {error.args[0]} is missing"
        ) from None
    parts = (part for layer in encoder.layers for part in vars(layer).values())
    arrays = [array for part in parts if isinstance(part, Affine) for array in part]
    mx.eval(arrays, encoder.word, encoder.position, encoder.type, dict(encoder.rest))
    return encoder


def _renamed(name: str) -> str:
    for pattern, new in _RENAMES:
        name = re.sub(pattern, new, name)
    return name


def _dequantized(weights: dict[str, mx.array], config: Mapping[str, Any]) -> dict[str, mx.array]:
    """Return ``weights`` with those quantized by MLX approximately restored."""
    import mlx.core as mx

    kind = config.get("quantization") or config.get("quantization_config") or {}
    found = {}
    for name, weight in weights.items():
        stem = name.removesuffix(".weight")
        if f"{stem}.scales" in weights and name != stem:
            found[name] = mx.dequantize(
                weight,
                weights[f"{stem}.scales"],
                weights.get(f"{stem}.biases"),
                group_size=int(kind.get("group_size", 64)),
                bits=int(kind.get("bits", 4)),
                mode=str(kind.get("mode", "affine")),
            )
        elif not name.endswith((".scales", ".biases")):
            found[name] = weight
    return found


def _assemble(weights: dict[str, mx.array], config: Mapping[str, Any]) -> Encoder:
    family = config["model_type"]
    _check(family, config)
    count = int(_first(config, "num_hidden_layers", "n_layer"))
    thetas, reaches = _positions(family, config, count)
    layers = tuple(_layer(weights, f"layers.{i}.", thetas[i], reaches[i]) for i in range(count))
    learned = weights.get("position.weight")
    kept = ("layers.", "word.", "position.", "type.", "embed_norm.", "final_norm.")
    activation = str(
        _first(config, "hidden_act", "hidden_activation", "activation_function", default="gelu")
    )
    if activation not in _ACTIVATIONS:
        raise ModelUnavailable(f"the activation {activation} of this encoder is not supported")
    return Encoder(
        word=weights["word.weight"],
        position=learned,
        first_position=int(config.get("pad_token_id", 1)) + 1 if "roberta" in family else 0,
        type=weights.get("type.weight"),
        embed_norm=_affine(weights, "embed_norm"),
        layers=layers,
        final_norm=_affine(weights, "final_norm") if "final_norm.weight" in weights else None,
        rest={name: w for name, w in weights.items() if not name.startswith(kept)},
        heads=int(_first(config, "num_attention_heads", "n_head")),
        eps=float(_first(config, "layer_norm_eps", "norm_eps", "layer_norm_epsilon", default=1e-5)),
        activation=_ACTIVATIONS[activation],
        gated=family in ("modernbert", "nomic_bert"),
        pre_norm=family == "modernbert",
    )


def _check(family: str, config: Mapping[str, Any]) -> None:
    """Raise `ModelUnavailable` for unsupported variants of a family."""
    kind = config.get("position_embedding_type", "absolute")
    if kind != "absolute" or config.get("is_decoder"):
        raise ModelUnavailable(f"a {family} with positions of kind {kind}, or a decoder of it")
    wrong = [
        name
        for name, plain in (
            ("prenorm", False),
            ("rotary_emb_interleaved", False),
            ("rotary_emb_fraction", 1.0),
            ("moe_every_n_layers", 0),
            ("rotary_scaling_factor", None),
        )
        if name in config and config[name] not in (plain, None)
    ]
    if wrong:
        raise ModelUnavailable(f"a {family} with {wrong[0]} = {config[wrong[0]]!r}")


def _layer(
    weights: Mapping[str, mx.array], at: str, theta: float | None, reach: int | None
) -> EncoderLayer:
    if f"{at}qkv.weight" in weights:
        qkv = _affine(weights, f"{at}qkv")
    else:
        qkv = _joined([_affine(weights, f"{at}{one}") for one in "qkv"])
    if f"{at}gate_up.weight" in weights:
        up = _affine(weights, f"{at}gate_up")
    elif f"{at}gate.weight" in weights:
        up = _joined([_affine(weights, f"{at}gate"), _affine(weights, f"{at}up")])
    else:
        up = _affine(weights, f"{at}up")
    norm = f"{at}attn_norm"
    return EncoderLayer(
        qkv=qkv,
        out=_affine(weights, f"{at}out"),
        attn_norm=_affine(weights, norm) if f"{norm}.weight" in weights else None,
        up=up,
        down=_affine(weights, f"{at}down"),
        mlp_norm=_affine(weights, f"{at}mlp_norm"),
        rope_theta=theta,
        reach=reach,
    )


def _positions(
    family: str, config: Mapping[str, Any], count: int
) -> tuple[list[float | None], list[int | None]]:
    """Return the base of rotary positions, and how far a token sees, for each layer."""
    ropes = config.get("rope_parameters") or {}
    if family == "nomic_bert":
        theta = ropes.get("rope_theta") or config.get("rotary_emb_base") or 1000.0
        return [float(theta)] * count, [None] * count
    if family != "modernbert":
        return [None] * count, [None] * count
    kinds = config.get("layer_types")
    if kinds is None:
        every = int(config.get("global_attn_every_n_layers", 3))
        kinds = ["sliding_attention" if i % every else "full_attention" for i in range(count)]
    thetas = {
        "full_attention": config.get("global_rope_theta", 160_000.0),
        "sliding_attention": config.get("local_rope_theta", 10_000.0)
        or config.get("global_rope_theta", 160_000.0),
    }
    thetas |= {name: each["rope_theta"] for name, each in ropes.items() if "rope_theta" in each}
    half = int(config.get("local_attention", 128)) // 2
    return (
        [float(thetas[kind] or 10_000.0) for kind in kinds],
        [half if kind == "sliding_attention" else None for kind in kinds],
    )


def _affine(weights: Mapping[str, mx.array], name: str) -> Affine:
    return Affine(weights[f"{name}.weight"], weights.get(f"{name}.bias"))


def _joined(parts: list[Affine]) -> Affine:
    import mlx.core as mx

    biases = [part.bias for part in parts if part.bias is not None]
    weight = mx.concatenate([part.weight for part in parts])
    return Affine(weight, mx.concatenate(biases) if biases else None)


def _first(config: Mapping[str, Any], *names: str, default: Any = None) -> Any:
    for name in names:
        if config.get(name) is not None:
            return config[name]
    if default is None:
        raise KeyError(f"{names[0]} in config.json")
    return default
