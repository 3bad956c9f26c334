"""The architectures whose checkpoints have a head for multi-token prediction, and the structure
of the head.

The computation follows the DeepSeek-V3 report (section 2.2): the hidden state of a position and
the embedding of the next token are normalized, concatenated and projected; a decoder layer and a
norm follow. Embedding and last layer are the model's own. The hidden state is taken after the
model's final norm, and a head that is applied again uses its own state after its final norm, as
in vLLM and SGLang. These two differ in the first position, where vLLM omits the embedding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class HeadKind:
    """How the head of an architecture is stored and computed."""

    prefix: str  # of its weights; ``{layers}`` stands for the number of the model's layers
    block: str = ""  # prefix of the decoder layer's weights, after ``prefix``
    embedding_norm: str
    hidden_norm: str
    projection: str
    final_norm: str
    hidden_first: bool = False  # whether the hidden state comes first in the concatenation
    shared: tuple[str, ...] = ()  # copies of the model's own weights, which are ignored
    one_layer: Mapping[str, Any] = field(default_factory=dict)
    """Changes of the model's arguments that make the head's layer its only layer."""
    norms_from_zero: bool = False
    """Whether the published checkpoint stores norms as the difference from one."""
    masks_are_arrays: bool = False  # whether the layer accepts no other masks

    @property
    def parts(self) -> dict[str, str]:
        """The names of the weights outside the decoder layer, by field."""
        names = ("embedding_norm", "hidden_norm", "projection", "final_norm")
        return {name: getattr(self, name) for name in names}


_DEEPSEEK: dict[str, Any] = {
    "prefix": "model.layers.{layers}.",
    "embedding_norm": "enorm",
    "hidden_norm": "hnorm",
    "projection": "eh_proj",
    "final_norm": "shared_head.norm",
    "shared": ("embed_tokens.", "shared_head.head."),
    "one_layer": {"num_hidden_layers": 1, "first_k_dense_replace": 0},
}
KINDS: dict[str, HeadKind] = {
    "deepseek_v3": HeadKind(**_DEEPSEEK, masks_are_arrays=True),
    "glm4_moe": HeadKind(**_DEEPSEEK),
    "mimo": HeadKind(
        prefix="model.mtp_layers.0.",
        embedding_norm="token_layernorm",
        hidden_norm="hidden_layernorm",
        projection="input_proj",
        final_norm="final_layernorm",
        hidden_first=True,
        one_layer={"num_hidden_layers": 1},
    ),
    "qwen3_next": HeadKind(
        prefix="mtp.",
        block="layers.0.",
        embedding_norm="pre_fc_norm_embedding",
        hidden_norm="pre_fc_norm_hidden",
        projection="fc",
        final_norm="norm",
        one_layer={
            "num_hidden_layers": 1,
            "full_attention_interval": 1,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
        norms_from_zero=True,
    ),
}
"""By mlx-lm's ``model_type``."""
