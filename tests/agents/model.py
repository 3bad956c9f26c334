"""A small model that acts a script: its reply depends on how far the conversation is.

Its weights are constructed, as in `tests.clients.reciter`. The tokenizer is the demo model's, so
that an agent's prompt has as many tokens as on a real model; each reply of the script is one more
token of its vocabulary. The chat template ends a prompt with the token of the current step, which
it counts by the assistant's messages, and the head maps each step to its reply.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
from tokenizers import AddedToken, Tokenizer

END = "<|im_end|>"
CONTEXT = 131_072
_STEP = "<|step_{}|>"
_HIDDEN = 64
_HEADS, _HEAD_DIM = 2, 32
_CERTAINTY = 4.0

_TEMPLATE = r"""
{%- if tools %}{{ '<|im_start|>system\nTools:' }}
{%- for tool in tools %}{{ '\n' ~ (tool | tojson) }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}
{%- set turns = namespace(count=0) %}
{%- for m in messages %}
  {%- if m.role == 'assistant' %}{% set turns.count = turns.count + 1 %}{% endif %}
  {{- '<|im_start|>' ~ m.role ~ '\n' ~ (m.content or '') }}
  {%- for tool_call in m.tool_calls or [] %}
    {%- set tool_call = tool_call.function %}
    {{- '\n<tool_call>\n{"name": "' ~ tool_call.name ~ '", "arguments": ' }}
    {{- tool_call.arguments | tojson }}
    {{- '}\n</tool_call>' }}
  {%- endfor %}
  {{- '<|im_end|>\n' }}
{%- endfor %}
{{- '<|im_start|>assistant\n' }}
{{- '<|step_' ~ ([turns.count, LAST] | min if tools else 'plain') ~ '|>' }}
"""


def make_actor(path: Path, demo: Path, replies: Sequence[str], plain: str) -> Path:
    """Write the model into the directory ``path``, and return ``path``.

    It answers the conversation's nth turn with the nth of ``replies``, the last one for all later
    turns, and with ``plain`` where there are no tools. ``demo`` has the tokenizer.
    """
    path.mkdir(parents=True, exist_ok=True)
    steps = [_STEP.format(number) for number in (*range(len(replies)), "plain")]
    tokenizer = Tokenizer.from_file(str(demo / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(step, special=True) for step in steps])
    said = list(dict.fromkeys([*replies, plain]))
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in said])
    tokenizer.save(str(path / "tokenizer.json"))
    config = json.loads((demo / "tokenizer_config.json").read_text())
    config["chat_template"] = _TEMPLATE.replace("LAST", str(len(replies) - 1))
    config["eos_token"] = END
    config["model_max_length"] = CONTEXT
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    special = demo / "special_tokens_map.json"
    if special.exists():
        shutil.copy(special, path)
    end = tokenizer.token_to_id(END)
    follows = {
        tokenizer.token_to_id(step): tokenizer.token_to_id(text)
        for step, text in zip(steps, [*replies, plain], strict=True)
    }
    follows |= {tokenizer.token_to_id(text): end for text in said}
    _write_weights(path, tokenizer.get_vocab_size(), follows, end)
    return path


def _write_weights(path: Path, vocabulary: int, follows: dict[int, int], end: int) -> None:
    """Write a model that says ``follows[token]`` after each token, and ``end`` after others."""
    dims = {token: 1 + number for number, token in enumerate(follows)}
    assert len(dims) < _HIDDEN
    embedding = [[0.0] * _HIDDEN for _ in range(vocabulary)]
    head = [[0.0] * _HIDDEN for _ in range(vocabulary)]
    for token in range(vocabulary):
        embedding[token][dims.get(token, 0)] = 1.0
    head[end][0] = _CERTAINTY
    for token, following in follows.items():
        head[following][dims[token]] = _CERTAINTY
    width = _HEADS * _HEAD_DIM
    layer = "model.layers.0."
    weights = {
        "model.embed_tokens.weight": mx.array(embedding),
        "lm_head.weight": mx.array(head),
        "model.norm.weight": mx.full((_HIDDEN,), 1 / math.sqrt(_HIDDEN) * 8),
        layer + "input_layernorm.weight": mx.ones((_HIDDEN,)),
        layer + "post_attention_layernorm.weight": mx.ones((_HIDDEN,)),
        **{layer + f"self_attn.{name}_proj.weight": mx.zeros((width, _HIDDEN)) for name in "qkv"},
        layer + "self_attn.o_proj.weight": mx.zeros((_HIDDEN, width)),
        layer + "mlp.gate_proj.weight": mx.zeros((_HIDDEN, _HIDDEN)),
        layer + "mlp.up_proj.weight": mx.zeros((_HIDDEN, _HIDDEN)),
        layer + "mlp.down_proj.weight": mx.zeros((_HIDDEN, _HIDDEN)),
    }
    mx.save_safetensors(str(path / "model.safetensors"), weights, metadata={"format": "mlx"})
    config = {
        "model_type": "llama",
        "hidden_size": _HIDDEN,
        "intermediate_size": _HIDDEN,
        "num_hidden_layers": 1,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _HEADS,
        "head_dim": _HEAD_DIM,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "vocab_size": vocabulary,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": False,
        "eos_token_id": end,
    }
    (path / "config.json").write_text(json.dumps(config, indent=2))
