"""Incremental decoding of token ids to text: each character as soon as it is complete."""

from __future__ import annotations

import codecs
from collections.abc import Callable
from typing import Any, Protocol

_MAX_TOKENS = 64
_CONTEXT_TOKENS = 16
"""How many tokens of a line are decoded again with the next token, and how many are kept after
trimming. Spaces depend on the previous token, and a character has at most four tokens."""


class TokenDecoder(Protocol):
    """The text of one sequence as its tokens arrive. The time per token does not depend on the
    length."""

    def add(self, token: int) -> str:
        """Return the text that became final. Ids unknown to the tokenizer have no text."""

    def finish(self) -> str:
        """Return the rest. Incomplete characters become replacement characters."""


class ByteDecoder:
    """A decoder for tokenizers whose tokens are bytes.

    ``trims_space`` drops a space at the start of the text.
    """

    def __init__(self, token_bytes: Callable[[int], bytes], trims_space: bool) -> None:
        self._token_bytes = token_bytes
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._trims_space = trims_space

    def add(self, token: int) -> str:
        return self._shown(self._decode(self._token_bytes(token)))

    def finish(self) -> str:
        return self._shown(self._decode(b"", True))

    def _shown(self, text: str) -> str:
        if self._trims_space and text:
            self._trims_space = False
            return text.removeprefix(" ")
        return text


class LineDecoder:
    """A decoder for all other tokenizers, with mlx-lm's detokenizer. That decodes a whole line
    again for each token, so old tokens of long lines are dropped from it."""

    def __init__(self, detokenizer: Any) -> None:
        self._detokenizer = detokenizer

    def add(self, token: int) -> str:
        detokenizer = self._detokenizer
        detokenizer.add_token(token)
        segment: str = detokenizer.last_segment
        if len(detokenizer.tokens) > _MAX_TOKENS:
            detokenizer._current_tokens = detokenizer._current_tokens[-_CONTEXT_TOKENS:]
            detokenizer._text = detokenizer._current_text = ""
            detokenizer.offset = len(detokenizer.text)
            detokenizer.tokens.clear()
        return segment

    def finish(self) -> str:
        self._detokenizer.finalize()
        segment: str = self._detokenizer.last_segment
        return segment
