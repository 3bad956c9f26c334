"""The tokens of earlier prompts and replies, for the prompts that go on where they ended.

A client sends a reply back as text, and the tokenizer does not always cut text where
the model did. Where a prompt begins with text whose tokens are known, these are used: the
model reads the same text, and the blocks of its KV cache are found.
"""

from __future__ import annotations

import codecs
import sys
from array import array
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple, TypeVar

MAX_BYTES = 64 << 20
"""Of memory, for all texts that are kept together with their tokens."""
_ENTRY_BYTES, _ANCHOR_BYTES = 1000, 150

_Items = TypeVar("_Items", str, "array[int]")
_Key = tuple[str, bytes]
"""Scope, and the digest of the tokens."""
_STRIDE = 4096


class Anchor(NamedTuple):
    """An added token: where its text begins, and its number. No tokenizer reads across one, so
    what comes before it and what comes after are tokenized apart."""

    position: int
    token_index: int


class PrefixComparison(NamedTuple):
    """A prompt beside the closest earlier one, or a reply to it. ``common_tokens`` tokens are the
    same from the beginning; then ``earlier_token`` was where now is ``token``, each None at the
    end. ``reused_tokens`` tokens were taken over."""

    tokens: int
    earlier_tokens: int
    common_tokens: int
    reused_tokens: int
    token: int | None
    earlier_token: int | None


@dataclass(eq=False)
class _Entry:
    text: str
    tokens: array[int]
    anchors: list[Anchor] = field(default_factory=list)
    reused_tokens: int = 0
    comparison: PrefixComparison | None = None
    serial: int = 0
    """The higher, the later it came."""
    size_bytes: int = 0


class TokenizationCache:
    """Bounded by ``max_bytes``; what was used longest ago goes first. Nothing is shared between
    scopes. To find the closest text takes the time of a binary search, however many there are.

    ``added`` are the tokenizer's added tokens as text, ``token_bytes`` gives the bytes of the
    others, ``encode`` tokenizes text without putting anything in front.
    """

    def __init__(
        self,
        added: Mapping[int, str],
        token_bytes: Callable[[int], bytes],
        encode: Callable[[str], list[int]],
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._added = added
        self._token_bytes = token_bytes
        self._encode = encode
        self._max_bytes = max_bytes
        self._entries: OrderedDict[_Key, _Entry] = OrderedDict()
        self._sorted: list[tuple[str, str, _Key]] = []
        """Scope, text and key of all. What begins most alike is next to each other."""
        self._bytes = 0
        self._count = 0

    def __len__(self) -> int:
        return len(self._entries)

    def tokenize(self, scope: str, text: str) -> list[int]:
        """The tokens of the prompt ``text``, which is remembered."""
        closest, common = self._closest(scope, text)
        prompt = self._continue(closest, common, text) if closest is not None else None
        if prompt is None:
            prompt = _Entry(text, array("i", self._encode(text)))
            self._add_anchors(prompt, 0, 0)
        if closest is not None:
            prompt.comparison = _compare(prompt, closest)
        self._add(scope, prompt)
        return prompt.tokens.tolist()

    def extend(self, scope: str, prompt: Sequence[int], output: Sequence[int]) -> None:
        """``prompt``, if it is remembered, was answered with ``output``."""
        begun = self._entries.get(_key(scope, array("i", prompt)))
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
            pieces.append(decoder.decode(self._token_bytes(token)) if added is None else added)
            length += len(pieces[-1])
        text = begun.text + "".join(pieces)
        self._add(scope, _Entry(text, begun.tokens + array("i", output), anchors))

    def comparison(self, scope: str, prompt: Sequence[int]) -> PrefixComparison:
        """How ``prompt`` compares to what was there before it."""
        entry = self._entries.get(_key(scope, array("i", prompt)))
        if entry is None or entry.comparison is None:
            return PrefixComparison(len(prompt), 0, 0, 0, None, None)
        return entry.comparison

    def _closest(self, scope: str, text: str) -> tuple[_Entry | None, int]:
        """The entry that has the most of the beginning of ``text``, the last of these that came,
        and how much. Entries that ``text`` only goes on from are dropped: it will have all of
        theirs."""
        place = bisect_left(self._sorted, (scope, text))
        best, most = None, 0
        for key in [*self._equal_entries(place - 1, -1), *self._equal_entries(place, 1)]:
            entry = self._entries[key]
            common = _common(entry.text, text) if key[0] == scope else 0
            if common > most or (
                best is not None and common == most and entry.serial > best.serial
            ):
                best, most = entry, common
        contained = [
            key
            for key in self._equal_entries(place, 1)
            if (key[0], self._entries[key].text) == (scope, text)
        ]
        for before in range(place - 1, -1, -1):
            of, earlier, key = self._sorted[before]
            if of != scope or not text.startswith(earlier):
                break
            contained.append(key)
        for key in contained:
            self._drop(key)
        return best, most

    def _equal_entries(self, place: int, step: int) -> list[_Key]:
        """From ``place`` in direction ``step``, entries with the scope and text of the first."""
        found: list[_Key] = []
        first = place
        while 0 <= place < len(self._sorted) and self._sorted[place][:2] == self._sorted[first][:2]:
            found.append(self._sorted[place][2])
            place += step
        return found

    def _continue(self, earlier: _Entry, common: int, text: str) -> _Entry | None:
        """``text`` with the tokens of ``earlier`` up to the last anchor that they share."""
        for anchor in reversed(earlier.anchors):
            token = earlier.tokens[anchor.token_index]
            if anchor.position + len(self._added[token]) <= common:
                break
        else:
            return None
        rest = self._encode(text[anchor.position :])
        if rest[:1] != [token]:
            return None
        prompt = _Entry(
            text,
            earlier.tokens[: anchor.token_index] + array("i", rest),
            [each for each in earlier.anchors if each.token_index < anchor.token_index],
            reused_tokens=anchor.token_index,
        )
        self._add_anchors(prompt, anchor.token_index, anchor.position)
        return prompt

    def _add_anchors(self, entry: _Entry, index: int, position: int) -> None:
        for number in range(index, len(entry.tokens)):
            added = self._added.get(entry.tokens[number])
            if added is None:
                continue
            position = entry.text.find(added, position)
            if position < 0:
                return
            entry.anchors.append(Anchor(position, number))
            position += len(added)

    def _add(self, scope: str, entry: _Entry) -> None:
        key = _key(scope, entry.tokens)
        if key in self._entries:
            self._drop(key)
        self._count += 1
        entry.serial = self._count
        entry.size_bytes = (
            sys.getsizeof(entry.text)
            + sys.getsizeof(entry.tokens)
            + len(entry.anchors) * _ANCHOR_BYTES
            + _ENTRY_BYTES
        )
        self._entries[key] = entry
        insort(self._sorted, (scope, entry.text, key))
        self._bytes += entry.size_bytes
        while self._bytes > self._max_bytes:
            self._drop(next(iter(self._entries)))

    def _drop(self, key: _Key) -> None:
        entry = self._entries.pop(key)
        self._bytes -= entry.size_bytes
        del self._sorted[bisect_left(self._sorted, (key[0], entry.text, key))]


def _key(scope: str, tokens: array[int]) -> _Key:
    return scope, blake2b(tokens.tobytes(), digest_size=16).digest()


def _compare(prompt: _Entry, earlier: _Entry) -> PrefixComparison:
    same = _common(prompt.tokens, earlier.tokens)
    return PrefixComparison(
        len(prompt.tokens),
        len(earlier.tokens),
        same,
        prompt.reused_tokens,
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
