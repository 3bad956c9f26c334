"""Tokenizers that come as tiktoken ranks with their own Python code, such as Kimi K2's.

They are converted once to the files of a fast tokenizer. Routers, which run no code from models,
can read these; grammars need a fast tokenizer too."""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import shutil
import tempfile
from pathlib import Path
from typing import Any

from shared.paths import user_cache

logger = logging.getLogger(__name__)

RANKS, CONFIG, FAST = "tiktoken.model", "tokenizer_config.json", "tokenizer.json"
SPECIAL_TOKENS = 256
"""They follow the ranks, with names from the config or ``<|reserved_token_N|>``."""
_FORMAT = "1"  # of the converted files: increase it after a change here
_CLASS = "tokenization_kimi.TikTokenTokenizer"
_LETTERS = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_UPPER, _LOWER = (f"[{letters}&&[^\\p{{Han}}]]" for letters in _LETTERS)
_LEAD, _ENDING = r"[^\r\n\p{L}\p{N}]?", "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
KIMI_PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        f"{_LEAD}{_UPPER}*{_LOWER}+{_ENDING}",
        f"{_LEAD}{_UPPER}+{_LOWER}*{_ENDING}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
"""How Kimi's tokenizers split text into words: ``pat_str`` in ``tokenization_kimi.py``."""


def tokenizer_directory(path: Path) -> Path:
    """Return the tokenizer's directory for the model in ``path``: the same one, or one in the
    user's cache with the converted files. Raises: OSError and ValueError."""
    config = _config(path)
    known = _CLASS in json.dumps(config.get("auto_map", ""))
    if (path / FAST).exists() or not known or not (path / RANKS).is_file():
        return path
    ranks = (path / RANKS).read_bytes()
    name = hashlib.sha256(ranks + json.dumps([_FORMAT, config]).encode()).hexdigest()[:32]
    kept = user_cache() / "tokenizers" / name
    if not (kept / FAST).exists():
        logger.info("converting the tokenizer in %s", path)
        _publish(kept, {FAST: _converted(ranks, config), CONFIG: json.dumps(_fast_config(config))})
    return kept


def _publish(folder: Path, files: dict[str, str]) -> None:
    """Create ``folder`` with ``files``, unless another process was faster."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        for name, content in files.items():
            (made / name).write_text(content, encoding="utf-8")
        made.rename(folder)
    except OSError:
        shutil.rmtree(made, ignore_errors=True)
        if not (folder / FAST).exists():
            raise


def _config(path: Path) -> dict[str, Any]:
    try:
        found = json.loads((path / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _fast_config(config: dict[str, Any]) -> dict[str, Any]:
    left_out = ("auto_map", "added_tokens_decoder", "vocab_file")
    kept = {key: value for key, value in config.items() if key not in left_out}
    return {**kept, "tokenizer_class": "PreTrainedTokenizerFast"}


def _converted(content: bytes, config: dict[str, Any]) -> str:
    """Return the ``tokenizer.json`` of ``content``, lines with a token in base64 and its rank."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    lines = (line.split() for line in content.splitlines() if line)
    ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
    vocabulary = {_text(token): rank for token, rank in ranks.items()}
    merges = [tuple(map(_text, pair)) for pair in _merges(ranks)]
    # A word that is a token becomes that token, whether or not merges lead to it.
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(KIMI_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    named = config.get("added_tokens_decoder", {})
    for number in range(len(ranks), len(ranks) + SPECIAL_TOKENS):
        token = named.get(str(number), {"content": f"<|reserved_token_{number}|>", "special": True})
        add = tokenizer.add_special_tokens if token.get("special") else tokenizer.add_tokens
        add([AddedToken(token["content"], normalized=False, special=bool(token.get("special")))])
    return str(tokenizer.to_str())


def _merges(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Return the pairs of tokens that merge into one, in the order of merging."""
    found = []
    for token, rank in ranks.items():
        pairs = ((token[:at], token[at:]) for at in range(1, len(token)))
        known = [pair for pair in pairs if pair[0] in ranks and pair[1] in ranks]
        found += [(rank, ranks[left], ranks[right], left, right) for left, right in known]
    return [(left, right) for *_, left, right in sorted(found)]


def _text(token: bytes) -> str:
    return "".join(map(_CHARACTERS.__getitem__, token))


def _characters() -> list[str]:
    """Return the character of each byte in byte-level BPE, as in GPT-2."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


_CHARACTERS = _characters()
