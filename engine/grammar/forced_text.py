"""The text that a grammar forces at a position, found byte by byte within a bound.

llguidance would compute all of it before each mask, which takes as long as the text (`a{200000}`)
and as much memory, so `engine.grammar.compiled` disables that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy
from llguidance import LLMatcher, LLTokenizer

NEEDED_BYTES = 16
"""A token is chosen by so much of the text, or by the longest possible token if that has more. By
no more either: a choice must not depend on what else is known, such as after a draft."""
MAX_TOKEN_BYTES = 64
"""If a longer token is possible, none is chosen."""
MORE_BYTES = 8
"""Found in addition, to look ahead less often. A byte takes up to 0.1 ms, once for each byte."""

_MAX_WORDS = 64
"""Words of a mask that are not 0, above which nothing is forced: of the tokens that begin a text,
there are as many as the longest has bytes."""
_COMMON = 'a0 "\n'


class ForcedText:
    """The bytes that must follow the outputs of one sequence, as far as they are known."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self._tokenizer = tokenizer
        self._common = [tokenizer.tokenize_str(letter)[:1] for letter in _COMMON]
        self.clear()

    def clear(self) -> None:
        """Forget the text: the position is another one."""
        self._known = b""
        self._has_end = False
        """Whether nothing is forced after the known bytes, except ``_last``."""
        self._is_whole = False
        """Whether they end the whole text."""
        self._last: list[int] = []
        """The control token that is forced there, if there is one."""

    def advance(self, token: int) -> None:
        """Move behind ``token``."""
        text = self._tokenizer.decode_bytes([token])
        if self._known.startswith(text) and not self._tokenizer.is_special_token(token):
            self._known = self._known[len(text) :]
        else:
            self.clear()

    def token(self, mask: Any, inner: LLMatcher, before: Sequence[int]) -> int | None:
        """Return the token among several in ``mask`` (words,), int32, with which the tokenizer
        begins the text that ``inner`` forces after the token ``before``. None if it forces no text,
        or one that later text may join in a token."""
        allowed = _tokens(mask)
        longest = max(map(self._text, allowed), key=len, default=b"")
        if len(allowed) < 2 or len(longest) > MAX_TOKEN_BYTES:
            return None
        if not all(longest.startswith(self._text(t) or b"\0") for t in allowed):
            return None
        needed = max(NEEDED_BYTES, len(longest))
        self._look_ahead(inner, needed)
        if len(self._known) < len(longest):
            return None
        first = self._tokenized(self._known[:needed], before)[:1]
        return first[0] if first and first[0] in allowed else None

    def tokens(self, inner: LLMatcher, before: Sequence[int]) -> list[int]:
        """Return the tokens of the text that ``inner`` forces after the token ``before``, without
        those at its end that later text may join."""
        self._look_ahead(inner, NEEDED_BYTES)
        if self._has_end and (self._last or self._is_whole):
            return [*self._tokenized(self._known, before), *self._last]
        found: list[int] = self._tokenizer.tokenize_partial(self._known, list(before))[0]
        return found

    def _look_ahead(self, inner: LLMatcher, needed: int) -> None:
        """Extend the known bytes if there are fewer than ``needed``."""
        if self._has_end or len(self._known) >= needed:
            return
        ahead = inner.deep_copy()
        ahead.consume_tokens(self._tokenizer.tokenize_bytes(self._known))
        while len(self._known) < needed + MORE_BYTES:
            token = self._first_part(ahead)
            if token is None or self._tokenizer.is_special_token(token):
                self._has_end, self._is_whole = True, ahead.is_stopped()
                self._last = [] if token is None else [token]
                return
            self._known += self._text(token)
            ahead.consume_token(token)

    def _first_part(self, ahead: LLMatcher) -> int | None:
        """Return the shortest token that must follow, which is one byte or a control token."""
        if ahead.is_stopped() or sum(map(ahead.validate_tokens, self._common)) > 1:
            return None  # a mask that allows much takes long
        allowed = _tokens(numpy.frombuffer(ahead.compute_bitmask(), numpy.int32))
        if ahead.is_error():
            return None
        if len(allowed) == 1 and allowed[0] not in self._tokenizer.eos_tokens:
            return allowed[0]
        texts = {self._text(token): token for token in allowed}
        if len({text[:1] for text in texts}) != 1:
            return None
        shortest = min(texts, key=len)
        return texts[shortest] if len(shortest) == 1 else None

    def _text(self, token: int) -> bytes:
        """Return the bytes of ``token``, none if it is a control token."""
        special = self._tokenizer.is_special_token(token)
        return b"" if special else self._tokenizer.decode_bytes([token])

    def _tokenized(self, text: bytes, before: Sequence[int]) -> list[int]:
        """Return the tokens of ``text`` after the token ``before``."""
        both = self._tokenizer.tokenize_bytes(b"".join(map(self._text, before)) + text)
        if both[: len(before)] == list(before):
            return both[len(before) :]
        tokens: list[int] = self._tokenizer.tokenize_bytes(text)
        return tokens


def _tokens(mask: Any) -> list[int]:
    """Return the tokens in ``mask`` (words,), int32; none if they are many."""
    words = (mask != 0).nonzero()[0]
    if len(words) > _MAX_WORDS:
        return []
    bits = numpy.unpackbits(mask[words].view(numpy.uint8), bitorder="little").nonzero()[0]
    found: list[int] = (words[bits // 32] * 32 + bits % 32).tolist()
    return found
