"""A tiny model that answers every prompt with the same word.

Its weights are constructed: every token has its own dimension, layers add nothing, and the head
maps each token to the one that follows it. Grammars and ``ignore_eos`` work as on any model.
"""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
from tokenizers import Tokenizer

from tests.tiny_models import EOS, VOCAB_SIZE, make_tiny

ANSWER = "Paris!"
_CERTAINTY = 2.0


def make_reciter(path: Path) -> Path:
    """Write the model into the directory ``path``. Return ``path``."""
    make_tiny("llama", path)
    config = json.loads((path / "config.json").read_text())
    config |= {"hidden_size": VOCAB_SIZE, "num_attention_heads": 4, "num_key_value_heads": 2}
    (path / "config.json").write_text(json.dumps(config, indent=2))
    weights = mx.load(str(path / "model.safetensors"))
    assert isinstance(weights, dict)
    weights = {name: _weight(name, config) for name in weights}
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    newline = tokenizer.encode("\n").ids[-1]  # ends the prompt
    letters = [tokenizer.encode(letter).ids[0] for letter in ANSWER]
    follows = dict.fromkeys(range(VOCAB_SIZE), EOS)
    follows |= dict(zip([newline, *letters], [*letters, EOS], strict=True)) | {EOS: letters[0]}
    head = mx.zeros((VOCAB_SIZE, VOCAB_SIZE))
    for token, following in follows.items():
        head[following, token] = _CERTAINTY
    weights["lm_head.weight"] = head
    mx.save_safetensors(str(path / "model.safetensors"), weights, metadata={"format": "mlx"})
    return path


def _weight(name: str, config: dict[str, int]) -> mx.array:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    attention, dense = heads * config["head_dim"], config["intermediate_size"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    if name == "model.embed_tokens.weight":
        return mx.eye(VOCAB_SIZE)
    if "norm" in name:
        return mx.ones((hidden,))
    shapes = {
        "q_proj": (attention, hidden),
        "k_proj": (keys, hidden),
        "v_proj": (keys, hidden),
        "o_proj": (hidden, attention),
        "gate_proj": (dense, hidden),
        "up_proj": (dense, hidden),
        "down_proj": (hidden, dense),
        "lm_head": (VOCAB_SIZE, hidden),
    }
    return mx.zeros(shapes[name.split(".")[-2]])
