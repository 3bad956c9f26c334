"""Tokenizers of ranks, converted: the same tokens as tiktoken's way of merging."""

from __future__ import annotations

import asyncio
import base64
import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import regex
from tokenizers import Tokenizer

from engine.model.load import load
from engine.model.tiktoken import KIMI_PATTERN, tokenizer_directory
from router.tokens.rendering import Renderer
from tests.tiny_models import make_tiny

WORDS = [*"the Hello don 't 北京 北 123 é ing".split(), " the", " world", "  ", "\n\n"]
TEXTS = [
    "Hello world, don't! the theing  123456\n\n é",
    "中文English混合 北京北京 Pascal",
    "<|im_end|> a\tb 🗼",
]


def ranks() -> dict[bytes, int]:
    """Return the ranks of all bytes and of pieces of words, some of which no merge leads to."""
    tokens = [bytes([byte]) for byte in range(256)]
    for word in WORDS:
        data = word.encode()
        tokens += [data[:end] for end in range(2, len(data) + 1)]
    tokens.append("ßẞß".encode())
    return {token: rank for rank, token in enumerate(dict.fromkeys(tokens))}


def merged(word: bytes, known: dict[bytes, int]) -> list[int]:
    """Return the tokens of a word: of neighbours, those that make the token of the lowest rank are
    joined first."""
    if word in known:
        return [known[word]]
    parts = [word[i : i + 1] for i in range(len(word))]
    while True:
        joined = [(known.get(a + b), i) for i, (a, b) in enumerate(pairwise(parts))]
        possible = [(rank, i) for rank, i in joined if rank is not None]
        if not possible:
            return [known[part] for part in parts]
        _, at = min(possible)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def write_kimi(directory: Path, known: dict[bytes, int]) -> None:
    lines = [base64.b64encode(token) + f" {rank}".encode() for token, rank in known.items()]
    (directory / "tiktoken.model").write_bytes(b"\n".join(lines) + b"\n")
    first = len(known)
    added = {
        str(first): {"content": "[BOS]", "special": True},
        str(first + 2): {"content": "<|im_end|>", "special": True},
        str(first + 11): {"content": "<|tool_calls_section_begin|>", "special": False},
    }
    config: dict[str, Any] = {
        "added_tokens_decoder": added,
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "bos_token": "[BOS]",
        "eos_token": "<|im_end|>",
        "chat_template": "{{ messages[0].content }}<|im_end|>",
        "tokenizer_class": "TikTokenTokenizer",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_tokenizer_of_ranks_gives_tiktokens_tokens(tmp_path: Path, cache: Path) -> None:
    known = ranks()
    write_kimi(tmp_path, known)
    directory = tokenizer_directory(tmp_path)
    assert directory.is_relative_to(cache)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    rng = random.Random(0)
    texts = [*TEXTS, *("".join(rng.choices([*WORDS, "x", " ", "N", "."], k=30)) for _ in range(50))]
    for text in texts:
        pieces = regex.findall(KIMI_PATTERN, text, flags=regex.VERSION1)
        assert "".join(pieces) == text
        expected = [t for piece in pieces for t in merged(piece.encode(), known)]
        if "<|" not in text:
            assert tokenizer.encode(text).ids == expected
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    first = len(known)
    assert tokenizer.encode("<|im_end|>").ids == [first + 2]
    assert tokenizer.id_to_token(first + 1) == f"<|reserved_token_{first + 1}|>"
    assert tokenizer.get_vocab_size(with_added_tokens=True) == first + 256
    assert tokenizer_directory(tmp_path) == directory  # kept


def test_other_tokenizers_stay_where_they_are(tmp_path: Path, cache: Path, llama: Path) -> None:
    assert tokenizer_directory(llama) == llama
    (tmp_path / "tiktoken.model").write_bytes(b"")
    assert tokenizer_directory(tmp_path) == tmp_path
    assert not cache.exists()


def test_engine_and_router_read_such_a_tokenizer_without_its_code(
    tmp_path: Path, cache: Path
) -> None:
    path = make_tiny("llama", tmp_path / "model", vocab_size=1024)
    (path / "tokenizer.json").unlink()
    write_kimi(path, ranks())
    loaded = load(path)
    sent = tmp_path / "sent"
    sent.mkdir()
    for name, file in loaded.tokenizer_files.items():
        (sent / name).write_bytes(file.read_bytes())
    loading = Renderer.load(sent, tokenizer_options={}, chat_template=None, template_args={})
    renderer = asyncio.run(loading)
    for text in TEXTS:
        tokens = renderer.encode(text)
        assert tokens == loaded.tokenizer.encode(text)
        assert renderer.decode(tokens) == text
