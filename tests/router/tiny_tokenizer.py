"""A real tokenizer that is quick to make: bytes, a few merges, a chat template."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

BOS, EOS = 0, 1
CONTEXT = 512
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'function' %}{{ raise_exception('no function role here') }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
    "{% if explode %}{{ raise_exception('boom') }}{% endif %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}{{ extra or '' }}"
)
_MERGES = [
    ("h", "e"),
    ("l", "l"),
    ("he", "ll"),
    ("hell", "o"),
    ("Ġ", "w"),
    ("o", "r"),
    ("Ġw", "or"),
]


def write_tokenizer(directory: Path, **generation_config: object) -> Tokenizer:
    """Write the files of a model directory. Token 0 is the begin token, 1 the end token."""
    directory.mkdir(parents=True, exist_ok=True)
    vocab = {"<s>": BOS, "</s>": EOS}
    for char in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[char] = len(vocab)
    for left, right in _MERGES:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=_MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken("<s>", special=True), AddedToken("</s>", special=True)]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": EOS}))
    (directory / "generation_config.json").write_text(json.dumps(generation_config))
    return tokenizer
