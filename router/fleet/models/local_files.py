"""Facts about a model from its files, before it is loaded for the first time."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from router.tokens.fim import FimLayout, find_layout
from shared.model_config import stated_context

_MAX_FILE_BYTES = 64 * 1024 * 1024
"""The ``tokenizer.json`` of a large vocabulary has some tens of megabytes."""


class LocalFiles(NamedTuple):
    config: Mapping[str, Any] = MappingProxyType({})
    chat_template: str = ""
    added_tokens: Mapping[str, int] = MappingProxyType({})
    """Of the tokenizer: text to id."""

    @property
    def capabilities(self) -> list[str]:
        """The likely names of those that its engines will have."""
        found = {
            "chat": self.chat_template,
            "tools": "tools" in self.chat_template,
            "reasoning": "think" in self.chat_template,
        }
        return [name for name, is_likely in found.items() if is_likely]

    def fim_layout(self, setting: str) -> FimLayout | None:
        """Return the layout of prompts for fill-in-the-middle, with this ``--fim-layout``."""
        model_type = str(self.config.get("model_type", ""))
        return find_layout(setting, model_type, self.added_tokens)

    @property
    def context_length(self) -> int | None:
        """The context in the config. The engine may have less memory."""
        return stated_context(self.config) or None


def read_local_files(directory: str) -> LocalFiles:
    """Return what is known from ``directory``, which may be incomplete. Blocks."""
    path = Path(directory)
    config, tokenizer = _object(path / "config.json"), _object(path / "tokenizer_config.json")
    template: Any = _text(path / "chat_template.jinja")
    template = template or _object(path / "chat_template.json").get("chat_template")
    template = template or tokenizer.get("chat_template")
    return LocalFiles(
        config, template if isinstance(template, str) else "", _added_tokens(path, tokenizer)
    )


class _AddedToken(msgspec.Struct):
    content: str
    id: int = 0


class _TokenizerFile(msgspec.Struct):
    added_tokens: list[_AddedToken] = []


def _added_tokens(path: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, int]:
    """Return the added tokens in a tokenizer's config or, if there are none, in its file: newer
    releases of transformers write them there only."""
    with suppress(msgspec.ValidationError, ValueError):
        decoder = tokenizer_config.get("added_tokens_decoder") or {}
        found = msgspec.convert(decoder, dict[str, _AddedToken])
        if found:
            return {each.content: int(number) for number, each in found.items()}
    with suppress(msgspec.DecodeError, RecursionError):
        file = msgspec.json.decode(_text(path / "tokenizer.json"), type=_TokenizerFile)
        return {each.content: each.id for each in file.added_tokens}
    return {}


def _object(path: Path) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(_text(path))
    except (msgspec.DecodeError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _text(path: Path) -> str:
    with suppress(OSError, UnicodeDecodeError):
        if path.stat().st_size <= _MAX_FILE_BYTES:
            return path.read_text("utf-8")
    return ""
