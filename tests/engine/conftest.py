from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from llguidance import LLTokenizer

from engine.grammar.compiled import TokenizerSpec
from tests.tiny_models import EOS, VOCAB_SIZE


@pytest.fixture(scope="session")
def vocabulary(tiny_model: Callable[..., Path]) -> TokenizerSpec:
    text = (tiny_model("llama") / "tokenizer.json").read_text()
    return TokenizerSpec(text, VOCAB_SIZE, [EOS])


@pytest.fixture(scope="session")
def tokenizer(vocabulary: TokenizerSpec) -> LLTokenizer:
    return vocabulary.load()
