"""Tiny random models, made from mlx-lm's own classes, as normal model directories.

They compute like the full-size models and answer in milliseconds; their text is noise. Compare
logits of a random model, and its text only if the two ways of computing are the same bit for
bit: the gaps between its tokens are small.
"""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args

import mlx.core as mx
import mlx_lm
import numpy
from mlx.utils import tree_flatten, tree_map
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.fim_tokens import FIM
from zoo import configs

Kind = Literal[
    "llama",
    "qwen3",
    "gemma3",
    "mamba",
    "gpt_oss",
    "jamba",
    "qwen3_next",
    "nemotron_h",
    "deepseek_v2",
    "qwen3_5",
    "deepseek_v3",
    "glm4_moe",
    "mimo",
]
OF_HEADS = ("deepseek_v3", "glm4_moe", "mimo")
"""Those that are here for their heads for multi-token prediction alone."""
OF_RANKS = ("qwen3_5",)
"""Those that are here since mlx-lm can divide them, other than their like."""
KINDS: tuple[Kind, ...] = tuple(
    kind for kind in get_args(Kind) if kind not in (*OF_HEADS, *OF_RANKS)
)

VOCAB_SIZE = 320
SLIDING_WINDOW = 32
CONTEXT = 2048
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS = 2

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_TRAINING_TEXT = "the of and to in is that it was for on are as with they be at one have this"

_ATTENTION = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": CONTEXT,
}
_OF_ZOO = ("jamba", "qwen3_next", "nemotron_h", "deepseek_v2", *OF_RANKS, *OF_HEADS)
"""Kinds with recurrent layers, attention and experts in turn, some with latents, and `OF_HEADS`:
their configs are the zoo's."""

_CONFIGS: dict[str, dict[str, Any]] = {
    **{
        kind: configs.config(kind) | {"model_type": kind, "max_position_embeddings": CONTEXT}
        for kind in _OF_ZOO
    },
    "llama": _ATTENTION | {"model_type": "llama", "tie_word_embeddings": False},
    "qwen3": _ATTENTION | {"model_type": "qwen3", "tie_word_embeddings": False},
    "gemma3": _ATTENTION
    | {
        "model_type": "gemma3_text",
        "num_hidden_layers": 3,
        "sliding_window": SLIDING_WINDOW,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 16,
    },
    "mamba": {
        "model_type": "mamba",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "state_size": 8,
        "num_hidden_layers": 2,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_rank": 4,
    },
    "gpt_oss": _ATTENTION
    | {
        "model_type": "gpt_oss",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": SLIDING_WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}


def make_tiny(kind: Kind, path: Path, seed: int = 0, **changes: Any) -> Path:
    """Write a random model of ``kind`` into the directory ``path``, and return ``path``.

    The same ``seed`` gives the same weights. ``changes`` replace fields of the config. It has
    about 150,000 parameters in float32, a byte-level vocabulary of `VOCAB_SIZE` and a chat
    template; token `EOS` ends a turn.
    """
    path.mkdir(parents=True, exist_ok=True)
    config = _CONFIGS[kind] | changes | {"bos_token_id": 1, "eos_token_id": EOS, "pad_token_id": 0}
    (path / "config.json").write_text(json.dumps(config, indent=2))
    mx.save_safetensors(
        str(path / "model.safetensors"), _weights(config, seed), metadata={"format": "mlx"}
    )
    byte_tokenizer().save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(CHAT_TEMPLATE)))
    return path


def make_inserting(path: Path) -> Path:
    """Write a random model with tokens for fill-in-the-middle, and return ``path``."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken(each, special=False, normalized=False) for each in FIM])
    make_tiny("llama", path, vocab_size=tokenizer.get_vocab_size())
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def make_reciting(path: Path, texts: Mapping[str, str]) -> Path:
    """Write a model that answers a prompt with the text of ``texts`` whose name its last word is,
    between angle brackets, and return ``path``. It has no chat template but the messages' texts.

    Each piece of a text is a token of its own, and the weights are a table of what follows a token:
    attention and MLPs add nothing, and the head's row of a token is the embedding before it.
    """
    tokenizer = byte_tokenizer()
    follows: dict[int, int] = {}
    for name, text in texts.items():
        tokens = [f"<{name}>", *_pieces(text, tokenizer)]
        tokenizer.add_tokens([AddedToken(each, special=False) for each in tokens])
        ids = [*map(tokenizer.token_to_id, tokens), EOS]
        follows.update(pairwise(ids))
    size = tokenizer.get_vocab_size()
    make_tiny("llama", path, vocab_size=size, hidden_size=512)
    weights = dict(mx.load(str(path / "model.safetensors")))
    embeddings = mx.random.normal((size, 512))
    head = numpy.zeros((size, 512), numpy.float32)
    for before, after in follows.items():
        head[after] += numpy.array(embeddings[before])
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name] = mx.zeros(weight.shape)
        elif weight.ndim == 1:
            weights[name] = mx.ones(weight.shape)
    weights |= {"model.embed_tokens.weight": embeddings, "lm_head.weight": mx.array(head)}
    mx.save_safetensors(str(path / "model.safetensors"), weights, {"format": "mlx"})
    tokenizer.save(str(path / "tokenizer.json"))
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    (path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(template)))
    return path


def _pieces(text: str, tokenizer: Tokenizer) -> list[str]:
    """Divide ``text`` into pieces of about five characters, none of which is a token or occurs
    twice."""
    pieces: list[str] = []

    def is_free(piece: str) -> bool:
        return piece not in pieces and not tokenizer.token_to_id(piece)

    while text:
        free = (n for n in range(5, len(text) + 1) if is_free(text[:n]))
        if (size := next(free, 0)) == 0:
            while not is_free(text):
                text = pieces.pop() + text  # the end is a piece already
            size = len(text)
        pieces.append(text[:size])
        text = text[size:]
    return pieces


def tokenizer_config(template: str) -> dict[str, Any]:
    """Return the tokenizer_config.json of `byte_tokenizer` with a chat ``template``."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
        "bos_token": SPECIAL_TOKENS[1],
        "eos_token": SPECIAL_TOKENS[EOS],
        "pad_token": SPECIAL_TOKENS[0],
        "chat_template": template,
    }


def _weights(config: dict[str, Any], seed: int) -> dict[str, mx.array]:
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    mx.random.seed(seed)
    model = module.Model(module.ModelArgs.from_dict(config))

    def shaken(weight: mx.array) -> mx.array:
        """Add noise to norms, biases and sinks: they start as ones and zeros, which hides bugs."""
        return weight + 0.1 * mx.random.normal(weight.shape) if weight.ndim == 1 else weight

    return dict(tree_flatten(tree_map(shaken, model.parameters())))


def byte_tokenizer() -> Tokenizer:
    """Return a byte-level tokenizer with `VOCAB_SIZE` tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TRAINING_TEXT, CHAT_TEMPLATE], trainer)
    return tokenizer


def make_quantized(model: Path, path: Path, bits: int = 4, group_size: int = 32) -> Path:
    """Write the tiny model in ``model`` with quantized weights into ``path``, and return it."""
    shutil.copytree(model, path)
    loaded, config = mlx_lm.utils.load_model(model)
    loaded, config = mlx_lm.utils.quantize_model(loaded, config, group_size, bits)
    mx.save_safetensors(
        str(path / "model.safetensors"), dict(tree_flatten(loaded.parameters())), {"format": "mlx"}
    )
    (path / "config.json").write_text(json.dumps(config, indent=2))
    return path


def make_adapter(model: Path, path: Path, seed: int = 0, rank: int = 4) -> Path:
    """Write a random LoRA adapter of the tiny model in ``model``, for its last layer's attention,
    into ``path``, and return ``path``. It changes most of the model's answers."""
    config = json.loads((model / "config.json").read_text())
    parameters = {"rank": rank, "scale": 4.0, "dropout": 0.1}
    keys = ["self_attn.q_proj", "self_attn.v_proj"]
    last = config["num_hidden_layers"] - 1
    heads = config["num_attention_heads"], config["num_key_value_heads"]
    mx.random.seed(seed)
    weights = {}
    for key, count in zip(keys, heads, strict=True):
        name = f"model.layers.{last}.{key}"
        weights[f"{name}.lora_a"] = mx.random.normal((config["hidden_size"], rank))
        weights[f"{name}.lora_b"] = mx.random.normal((rank, count * config["head_dim"]))
    path.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(path / "adapters.safetensors"), weights)
    described = {"fine_tune_type": "lora", "num_layers": 1}
    described |= {"lora_parameters": parameters | {"keys": keys}}
    (path / "adapter_config.json").write_text(json.dumps(described))
    return path
