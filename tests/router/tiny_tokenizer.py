"""A real tokenizer that is quick to make: bytes, a few merges, a chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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
_MERGES = [tuple(pair.split()) for pair in "h e,l l,he ll,hell o,Ġ w,o r,Ġw or".split(",")]


def write_tokenizer(directory: Path, **generation_config: object) -> Tokenizer:
    """Write the files of a model directory. Token 0 is the begin token, 1 the end token."""
    directory.mkdir(parents=True, exist_ok=True)
    tokens = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, _MERGES)]
    vocab = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=_MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in ("<s>", "</s>")])
    tokenizer.save(str(directory / "tokenizer.json"))
    config: dict[str, object] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    config |= {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    config |= {"clean_up_tokenization_spaces": False}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": EOS}))
    (directory / "generation_config.json").write_text(json.dumps(generation_config))
    return tokenizer


def loaded_as(tokenizer: Tokenizer, path: Path) -> Any:
    """Return a tokenizer as mlx-lm loads it."""
    from mlx_lm import tokenizer_utils

    write_tokenizer(path)
    tokenizer.save(str(path / "tokenizer.json"))
    return tokenizer_utils.load(path)


def sentencepiece(path: Path) -> Any:
    """Return a tokenizer like Llama 2's: ▁ for spaces, bytes for unknown characters."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "a", "b", "▁a", "▁b", "ab", "▁ab"]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    merges = [("▁", "a"), ("▁", "b"), ("a", "b"), ("▁a", "b")]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    steps = (decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse())
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    return loaded_as(tokenizer, path)
