"""The tokens of earlier prompts and replies, for the prompts that go on where they ended.

A client sends a reply back as text, and the tokenizer does not always cut text where
the model did. Where a prompt begins with text whose tokens are known, these are used: the
model reads the same text, and the blocks of its KV cache are found.
"""

from __future__ import annotations

import codecs
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple, TypeVar

MAX_CHARS = 16_000_000
"""Of all texts that are kept together: in memory about as many bytes, or four times as many."""

_Items = TypeVar("_Items", str, "array[int]")
_STRIDE = 4096


class Anchor(NamedTuple):
    """An added token: where its text begins, and its number. No tokenizer reads across one, so
    what comes before it and what comes after are tokenized apart."""

    position: int
    number: int


class Comparison(NamedTuple):
    """A prompt beside the closest earlier one, or a reply to it. ``same`` tokens are the same
    from the beginning; then ``earlier_token`` was where now is ``token``, each None at
    the end. ``kept`` tokens were taken over."""

    tokens: int
    earlier_tokens: int
    same: int
    kept: int
    token: int | None
    earlier_token: int | None


@dataclass(eq=False)
class _Kept:
    text: str
    tokens: array[int]
    anchors: list[Anchor] = field(default_factory=list)
    taken: int = 0
    comparison: Comparison | None = None

    @property
    def cost(self) -> int:
        return len(self.text) + len(self.tokens)


class History:
    """Bounded; what was used longest ago goes first. Nothing is shared between scopes.

    ``added`` are the tokenizer's added tokens as text, ``raw`` gives the bytes of the
    others, ``encode`` tokenizes text without putting anything in front.
    """

    def __init__(
        self,
        added: Mapping[int, str],
        raw: Callable[[int], bytes],
        encode: Callable[[str], list[int]],
        max_chars: int = MAX_CHARS,
    ) -> None:
        self._added = added
        self._raw = raw
        self._encode = encode
        self._max_chars = max_chars
        self._kept: OrderedDict[tuple[str, bytes], _Kept] = OrderedDict()
        self._chars = 0

    def __len__(self) -> int:
        return len(self._kept)

    def tokens(self, scope: str, text: str) -> list[int]:
        """The tokens of the prompt ``text``, which is remembered."""
        closest, common = self._closest(scope, text)
        prompt = self._continued(closest, common, text) if closest is not None else None
        if prompt is None:
            prompt = _Kept(text, array("i", self._encode(text)))
            self._find_anchors(prompt, 0, 0)
        if closest is not None:
            prompt.comparison = _compare(prompt, closest)
        self._add(scope, prompt)
        return prompt.tokens.tolist()

    def extend(self, scope: str, prompt: Sequence[int], output: Sequence[int]) -> None:
        """``prompt``, if it is remembered, was answered with ``output``."""
        begun = self._kept.get(_key(scope, array("i", prompt)))
        if begun is None:
            return
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        pieces: list[str] = []
        anchors = list(begun.anchors)
        length = len(begun.text)
        for index, token in enumerate(output, len(prompt)):
            added = self._added.get(token)
            if added is not None:
                pieces.append(decoder.decode(b"", True))
                decoder.reset()
                length += len(pieces[-1])
                anchors.append(Anchor(length, index))
            pieces.append(decoder.decode(self._raw(token)) if added is None else added)
            length += len(pieces[-1])
        text = begun.text + "".join(pieces)
        self._add(scope, _Kept(text, begun.tokens + array("i", output), anchors))

    def comparison(self, scope: str, prompt: Sequence[int]) -> Comparison:
        """How ``prompt`` compares to what was there before it."""
        kept = self._kept.get(_key(scope, array("i", prompt)))
        if kept is None or kept.comparison is None:
            return Comparison(len(prompt), 0, 0, 0, None, None)
        return kept.comparison

    def _closest(self, scope: str, text: str) -> tuple[_Kept | None, int]:
        """The entry that has the most of the beginning of ``text``, and how much. Entries
        that ``text`` only goes on from are dropped: it will have all of theirs."""
        best, most, contained = None, 0, []
        for key, kept in reversed(self._kept.items()):
            if key[0] != scope:
                continue
            common = _common(kept.text, text)
            if common > most:
                best, most = kept, common
            if common == len(kept.text):
                contained.append(key)
        for key in contained:
            self._chars -= self._kept.pop(key).cost
        return best, most

    def _continued(self, earlier: _Kept, common: int, text: str) -> _Kept | None:
        """``text`` with the tokens of ``earlier`` up to the last anchor that they share."""
        for anchor in reversed(earlier.anchors):
            token = earlier.tokens[anchor.number]
            if anchor.position + len(self._added[token]) <= common:
                break
        else:
            return None
        rest = self._encode(text[anchor.position :])
        if rest[:1] != [token]:
            return None
        prompt = _Kept(
            text,
            earlier.tokens[: anchor.number] + array("i", rest),
            [each for each in earlier.anchors if each.number < anchor.number],
            taken=anchor.number,
        )
        self._find_anchors(prompt, anchor.number, anchor.position)
        return prompt

    def _find_anchors(self, kept: _Kept, index: int, position: int) -> None:
        for number in range(index, len(kept.tokens)):
            added = self._added.get(kept.tokens[number])
            if added is None:
                continue
            position = kept.text.find(added, position)
            if position < 0:
                return
            kept.anchors.append(Anchor(position, number))
            position += len(added)

    def _add(self, scope: str, kept: _Kept) -> None:
        key = _key(scope, kept.tokens)
        replaced = self._kept.pop(key, None)
        self._chars += kept.cost - (replaced.cost if replaced is not None else 0)
        self._kept[key] = kept
        while self._chars > self._max_chars:
            _, oldest = self._kept.popitem(last=False)
            self._chars -= oldest.cost


def _key(scope: str, tokens: array[int]) -> tuple[str, bytes]:
    return scope, blake2b(tokens.tobytes(), digest_size=16).digest()


def _compare(prompt: _Kept, earlier: _Kept) -> Comparison:
    same = _common(prompt.tokens, earlier.tokens)
    return Comparison(
        len(prompt.tokens),
        len(earlier.tokens),
        same,
        prompt.taken,
        prompt.tokens[same] if same < len(prompt.tokens) else None,
        earlier.tokens[same] if same < len(earlier.tokens) else None,
    )


def _common(one: _Items, other: _Items) -> int:
    """How many items are the same from the beginning."""
    low = 0
    while low < min(len(one), len(other)) and (
        one[low : low + _STRIDE] == other[low : low + _STRIDE]
    ):
        low += _STRIDE
    low = min(low, len(one), len(other))
    high = min(low + _STRIDE, len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
