"""Token ids to text, a token at a time: each character as soon as it is whole."""

from __future__ import annotations

import codecs
from collections.abc import Callable
from typing import Any, Protocol

_MOST_TOKENS = 64
_CONTEXT_TOKENS = 16
"""How many tokens of a line are decoded again with the next one, and how many are left after that.
Spaces depend on the token before, and characters have four tokens at most."""


class TokenDecoder(Protocol):
    """The text of one sequence while its tokens arrive. A token takes the same time whatever came
    before it."""

    def add(self, token: int) -> str:
        """Return what has become certain. Ids that the tokenizer does not know have no text."""

    def finish(self) -> str:
        """Return the rest. Bytes that are no character become replacement characters."""


class ByteDecoder:
    """For tokenizers whose tokens are bytes.

    It ``trims_space`` at the beginning of the text.
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
    """For all other tokenizers, with mlx-lm's detokenizer, which decodes a line from its beginning
    with each token: it is made to forget what is long past."""

    def __init__(self, detokenizer: Any) -> None:
        self._detokenizer = detokenizer

    def add(self, token: int) -> str:
        detokenizer = self._detokenizer
        detokenizer.add_token(token)
        segment: str = detokenizer.last_segment
        if len(detokenizer.tokens) > _MOST_TOKENS:
            detokenizer._current_tokens = detokenizer._current_tokens[-_CONTEXT_TOKENS:]
            detokenizer._text = detokenizer._current_text = ""
            detokenizer.offset = len(detokenizer.text)
            detokenizer.tokens.clear()
        return segment

    def finish(self) -> str:
        self._detokenizer.finalize()
        segment: str = self._detokenizer.last_segment
        return segment
