"""A random encoder of BERT-base's size: a checkpoint as on the hub, and the same as GGUF."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers

WORDS = 5000
LAYERS, HIDDEN, WIDE, HEADS, POSITIONS = 12, 768, 3072, 12, 512
EPSILON = 1e-12
_PAD, _WORD_BEGINS = "[PAD]", "\u2581"
_NAMES = {
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
}
"""Layers of a block, and their names in llama.cpp."""
_OTHER_NAMES = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.position_embeddings": "position_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.LayerNorm": "token_embd_norm",
}
_SPECIAL = ("bos", "eos", "unknown", "seperator", "padding", "cls", "mask")
"""As GGUF spells them."""
_NORMAL, _CONTROL = 1, 3
"""GGUF's types of tokens."""


def make_base(path: Path) -> Path:
    """Write a random encoder of BERT-base's size into ``path``, and return it."""
    path.mkdir()
    random = np.random.default_rng(0)

    def weights(*shape: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        return random.standard_normal(shape, np.float32) * np.float32(0.03)

    def affine(name: str, out: int, width: int) -> dict[str, Any]:
        return {f"{name}.weight": weights(out, width), f"{name}.bias": weights(out)}

    def norm(name: str) -> dict[str, Any]:
        return {f"{name}.weight": np.ones(HIDDEN, np.float32), f"{name}.bias": weights(HIDDEN)}

    tensors = {
        "embeddings.word_embeddings.weight": weights(WORDS, HIDDEN),
        "embeddings.position_embeddings.weight": weights(POSITIONS, HIDDEN),
        "embeddings.token_type_embeddings.weight": weights(2, HIDDEN),
        **norm("embeddings.LayerNorm"),
    }
    for layer in range(LAYERS):
        at = f"encoder.layer.{layer}"
        for part in ("query", "key", "value"):
            tensors |= affine(f"{at}.attention.self.{part}", HIDDEN, HIDDEN)
        tensors |= affine(f"{at}.attention.output.dense", HIDDEN, HIDDEN)
        tensors |= affine(f"{at}.intermediate.dense", WIDE, HIDDEN)
        tensors |= affine(f"{at}.output.dense", HIDDEN, WIDE)
        tensors |= norm(f"{at}.attention.output.LayerNorm") | norm(f"{at}.output.LayerNorm")
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config = {
        "model_type": "bert", "architectures": ["BertModel"], "vocab_size": WORDS,
        "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "intermediate_size": WIDE, "max_position_embeddings": POSITIONS, "type_vocab_size": 2,
        "hidden_act": "gelu", "layer_norm_eps": EPSILON, "pad_token_id": 0,
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    ids = {name: i for i, name in enumerate([_PAD, *_words()])}
    words = Tokenizer(models.WordLevel(ids, _PAD))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(path / "tokenizer.json"))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": _PAD}
    (path / "tokenizer_config.json").write_text(json.dumps(kind))
    return path


def write_gguf(folder: Path, path: Path) -> None:
    """Write the checkpoint in ``folder``, one of `make_base`, to ``path`` as GGUF in fp32.

    llama.cpp puts the token 0 before and after each text."""
    import mlx.core as mx  # not at the top: a fast BLAS has to be loaded before

    tensors = load_file(folder / "model.safetensors")
    numbers = {
        "bert.context_length": POSITIONS,
        "bert.embedding_length": HIDDEN,
        "bert.block_count": LAYERS,
        "bert.feed_forward_length": WIDE,
        "bert.attention.head_count": HEADS,
        "bert.pooling_type": 1,  # the mean
        "tokenizer.ggml.token_type_count": 2,
        **{f"tokenizer.ggml.{name}_token_id": 0 for name in _SPECIAL},
    }
    facts: dict[str, Any] = {
        "general.architecture": "bert",
        "general.name": "a random BERT",
        "bert.attention.layer_norm_epsilon": mx.array(EPSILON, mx.float32),
        "bert.attention.causal": mx.array(False),
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [_PAD, *(_WORD_BEGINS + word for word in _words())],
        "tokenizer.ggml.token_type": mx.array([_CONTROL, *[_NORMAL] * (WORDS - 1)], mx.int32),
        **{name: mx.array(number, mx.uint32) for name, number in numbers.items()},
    }
    mx.save_gguf(path, {_gguf_name(name): mx.array(each) for name, each in tensors.items()}, facts)


def _words() -> list[str]:
    return [f"w{number}" for number in range(WORDS - 1)]


def _gguf_name(name: str) -> str:
    module, _, part = name.rpartition(".")
    if module in _OTHER_NAMES:
        return f"{_OTHER_NAMES[module]}.{part}"
    _, _, number, layer = module.split(".", 3)
    return f"blk.{number}.{_NAMES[layer]}.{part}"
