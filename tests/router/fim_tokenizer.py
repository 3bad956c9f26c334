"""A tokenizer with Qwen2.5-Coder's tokens for fill-in-the-middle."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from tests.fim_tokens import FIM
from tests.router.chat_tokenizer import write_chat_tokenizer


def write_fim_tokenizer(directory: Path) -> Tokenizer:
    """Write the files of `write_chat_tokenizer`, with tokens for fill-in-the-middle."""
    tokenizer = write_chat_tokenizer(directory)
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in FIM])
    tokenizer.save(str(directory / "tokenizer.json"))
    return tokenizer
