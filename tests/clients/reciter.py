"""A tiny model that answers every prompt with the same word.

Grammars and ``ignore_eos`` work as on any model.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from tests.agents.model import write_weights
from tests.tiny_models import EOS, VOCAB_SIZE, make_tiny

ANSWER = "Paris!"


def make_reciter(path: Path) -> Path:
    """Write the model into the directory ``path``. Return ``path``."""
    make_tiny("llama", path)  # for its tokenizer
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    newline = tokenizer.encode("\n").ids[-1]  # ends the prompt
    letters = [tokenizer.encode(letter).ids[0] for letter in ANSWER]
    follows = dict(zip([EOS, newline, *letters], [letters[0], *letters, EOS], strict=True))
    write_weights(path, VOCAB_SIZE, follows, EOS)
    return path
