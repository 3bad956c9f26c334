"""A small model that acts scripts: its reply depends on how far the conversation is.

Its weights are constructed: each token that another has to follow has its own dimension, the layer
adds nothing, and the head maps each dimension to the token that follows. The tokenizer is the demo
model's, so that an agent's prompt has as many tokens as on a real model; each reply of a script is
one more token of its vocabulary. The chat template ends a prompt with the token of the current
step, which it counts by the assistant's messages behind the cue of a script.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
from tokenizers import AddedToken, Tokenizer

from tests.agents.formats import Format, Step

MODEL = "actor"
"""The name that agents are given."""
CONTEXT = 131_072
_STEP = "<|step_{}_{}|>"
_PLAIN = "<|step_plain|>"
_HEADS = 2
_CERTAINTY = 4.0

_TEMPLATE_OF_STEPS = r"""
{%- set at = namespace(script=none, last=0, turn=0) %}
{%- for m in messages %}
  {%- if m.role == 'user' %}
    {%- for cue, number, last, with_tools in CUES %}
      {%- if cue in m.content and with_tools == ((tools or []) | length > 0) %}
        {%- set at.script = number %}{% set at.last = last %}{% set at.turn = 0 %}
      {%- endif %}
    {%- endfor %}
  {%- elif m.role == 'assistant' %}{% set at.turn = at.turn + 1 %}
  {%- endif %}
{%- endfor %}
{{- '<|step_plain|>' if at.script is none else
    '<|step_' ~ at.script ~ '_' ~ ([at.turn, at.last] | min) ~ '|>' }}
"""


class Script(NamedTuple):
    """What the model says behind a user's message that contains ``cue``; the last step again and
    again."""

    cue: str
    steps: Sequence[Step]
    with_tools: bool = True
    """Whether it counts where the request has tools, or where it has none."""


def make_actor(
    path: Path, demo: Path, scripts: Sequence[Script], plain: str, format: Format
) -> Path:
    """Write the model into the directory ``path``, and return ``path``.

    It says ``plain`` where no cue of ``scripts`` is. ``demo`` has the tokenizer.
    """
    path.mkdir(parents=True, exist_ok=True)
    said: dict[str, Step] = {_PLAIN: Step(text=plain)}
    cues = []
    for number, script in enumerate(scripts):
        steps = format.steps(script.steps)
        said |= {_STEP.format(number, turn): step for turn, step in enumerate(steps)}
        cues.append([script.cue, number, len(steps) - 1, script.with_tools])
    tokenizer = Tokenizer.from_file(str(demo / "tokenizer.json"))
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True) for text in (*format.special_tokens, *said)]
    )
    texts = list(dict.fromkeys(format.write(step) for step in said.values()))
    tokenizer.add_tokens(
        [AddedToken(text, special=False, normalized=False) for text in (*format.markers, *texts)]
    )
    tokenizer.save(str(path / "tokenizer.json"))
    config = json.loads((demo / "tokenizer_config.json").read_text())
    steps_template = _TEMPLATE_OF_STEPS.replace("CUES", json.dumps(cues))
    config |= {
        "chat_template": format.template + steps_template,
        "eos_token": format.end,
        "model_max_length": CONTEXT,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    end = tokenizer.token_to_id(format.end)
    follows: dict[int, int] = {}
    for name, step in said.items():
        reply = tokenizer.token_to_id(format.write(step))
        follows |= {tokenizer.token_to_id(name): reply, reply: reply if step.endless else end}
    write_weights(path, tokenizer.get_vocab_size(), follows, end)
    return path


def write_weights(path: Path, vocabulary: int, follows: dict[int, int], end: int) -> None:
    """Write a model that says ``follows[token]`` after each token, and ``end`` after others."""
    hidden = 64 * (len(follows) // 64 + 1)
    dims = mx.zeros(vocabulary, dtype=mx.int32)
    dims[mx.array(list(follows))] = 1 + mx.arange(len(follows))
    head = mx.zeros((vocabulary, hidden))
    head[end, 0] = _CERTAINTY
    head[mx.array(list(follows.values())), 1 + mx.arange(len(follows))] = _CERTAINTY
    square = mx.zeros((hidden, hidden))
    layer = "model.layers.0."
    weights = {
        "model.embed_tokens.weight": mx.eye(hidden)[dims],
        "lm_head.weight": head,
        "model.norm.weight": mx.full((hidden,), 8 / math.sqrt(hidden)),
        layer + "input_layernorm.weight": mx.ones((hidden,)),
        layer + "post_attention_layernorm.weight": mx.ones((hidden,)),
        **{layer + f"self_attn.{name}_proj.weight": square for name in "qkvo"},
        **{layer + f"mlp.{name}_proj.weight": square for name in ("gate", "up", "down")},
    }
    mx.save_safetensors(str(path / "model.safetensors"), weights, metadata={"format": "mlx"})
    config = {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": hidden,
        "num_hidden_layers": 1,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _HEADS,
        "head_dim": hidden // _HEADS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "vocab_size": vocabulary,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": False,
        "eos_token_id": end,
    }
    (path / "config.json").write_text(json.dumps(config, indent=2))
