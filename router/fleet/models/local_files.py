"""Facts about a model from its files, before it is loaded for the first time."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from shared.model_config import stated_context

_MAX_FILE_BYTES = 16 * 1024 * 1024


class LocalFiles(NamedTuple):
    config: Mapping[str, Any] = MappingProxyType({})
    chat_template: str = ""

    @property
    def capabilities(self) -> list[str]:
        """The likely names of those that its engines will have."""
        found = {
            "chat": self.chat_template,
            "tools": "tools" in self.chat_template,
            "reasoning": "think" in self.chat_template,
        }
        return [name for name, is_likely in found.items() if is_likely]

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
    return LocalFiles(config, template if isinstance(template, str) else "")


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
