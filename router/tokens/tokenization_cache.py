"""The tokens of earlier prompts and answers, for prompts that continue them.

A client sends an answer back as text, and the tokenizer does not always split it into the tokens
that the model generated. If a prompt begins with text whose tokens are known, these tokens are
used: the model reads the same text, and the blocks in its KV cache are found.
"""

from __future__ import annotations

import codecs
import sys
import threading
from array import array
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple, TypeVar

MAX_BYTES = 64 << 20
"""Default max memory of a cache: its texts with their tokens."""
_ENTRY_BYTES, _ANCHOR_BYTES = 1000, 150

LengthCheck = Callable[[int], object]
"""Raises if a prompt with that many tokens is too long. Called before the tokens are copied from
the tokenizer and stored, because each copy blocks the interpreter."""

_Items = TypeVar("_Items", str, "array[int]")
_Key = tuple[str, bytes]
"""Scope, and digest of the tokens."""
_STRIDE = 4096


class Anchor(NamedTuple):
    """An added token in a text. No tokenizer merges text across it, so the text before and after it
    is tokenized separately."""

    position: int  # offset of its text, in characters
    token_index: int


class PrefixComparison(NamedTuple):
    """A prompt compared with the closest earlier text: a prompt, or one with its answer."""

    tokens: int
    earlier_tokens: int
    common_tokens: int  # length of the common prefix
    reused_tokens: int  # of these, taken from the earlier text instead of the tokenizer
    token: int | None  # the first token that differs; None at the end of the prompt
    earlier_token: (
        int | None
    )  # the earlier token at that position; None at the end of the earlier text


@dataclass(eq=False)
class _Entry:
    text: str
    tokens: array[int]
    anchors: list[Anchor] = field(default_factory=list)
    reused_tokens: int = 0
    comparison: PrefixComparison | None = None
    serial: int = 0  # counts additions to the cache
    size_bytes: int = 0


class TokenizationCache:
    """Texts with their tokens, in at most ``max_bytes``. The least recently used are dropped.

    Nothing is shared between scopes. The closest text is found by binary search.

    ``added`` has the text of the tokenizer's added tokens, ``token_bytes`` returns the bytes of any
    other token, and ``encode`` tokenizes text without adding special tokens. Thread-safe; these
    callbacks must be too.
    """

    def __init__(
        self,
        added: Mapping[int, str],
        token_bytes: Callable[[int], bytes],
        encode: Callable[[str, LengthCheck | None], list[int]],
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._added = added
        self._token_bytes = token_bytes
        self._encode = encode
        self._max_bytes = max_bytes
        self._entries: OrderedDict[_Key, _Entry] = OrderedDict()
        self._sorted: list[tuple[str, str, _Key]] = []
        """Scope, text and key of each entry. Texts with long common prefixes are neighbours."""
        self._bytes = 0
        self._count = 0
        self._lock = threading.Lock()
        """Guards everything above. Entries are immutable."""

    def __len__(self) -> int:
        return len(self._entries)

    def tokenize(self, scope: str, text: str, check_length: LengthCheck | None = None) -> list[int]:
        """Return the tokens of the prompt ``text``, and store them. Raises what ``check_length``
        raises."""
        with self._lock:
            closest, common = self._closest(scope, text)
        prompt = None
        try:
            if closest is not None:
                prompt = self._continue(closest, common, text, check_length)
            if prompt is None:
                prompt = _Entry(text, array("i", self._encode(text, check_length)))
                self._add_anchors(prompt, 0, 0)
        except Exception:
            if closest is not None:  # it may have been dropped to make room for the new one
                with self._lock:
                    self._add(scope, closest)
            raise
        if closest is not None:
            prompt.comparison = _compare(prompt, closest)
        with self._lock:
            self._add(scope, prompt)
        return prompt.tokens.tolist()

    def extend(self, scope: str, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Store ``output`` as the answer to ``prompt``. An unknown prompt is ignored."""
        with self._lock:
            entry = self._entries.get(_key(scope, array("i", prompt)))
        if entry is None:
            return
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        pieces: list[str] = []
        anchors = list(entry.anchors)
        length = len(entry.text)
        for index, token in enumerate(output, len(prompt)):
            added = self._added.get(token)
            if added is not None:
                pieces.append(decoder.decode(b"", True))
                decoder.reset()
                length += len(pieces[-1])
                anchors.append(Anchor(length, index))
            pieces.append(decoder.decode(self._token_bytes(token)) if added is None else added)
            length += len(pieces[-1])
        text = entry.text + "".join(pieces)
        with self._lock:
            self._add(scope, _Entry(text, entry.tokens + array("i", output), anchors))

    def comparison(self, scope: str, prompt: Sequence[int]) -> PrefixComparison:
        """Compare ``prompt`` with the closest text stored before it."""
        with self._lock:
            entry = self._entries.get(_key(scope, array("i", prompt)))
        if entry is None or entry.comparison is None:
            return PrefixComparison(len(prompt), 0, 0, 0, None, None)
        return entry.comparison

    def _closest(self, scope: str, text: str) -> tuple[_Entry | None, int]:
        """Return the entry with the longest common prefix with ``text`` (the latest if there are
        several), and the length of that prefix in characters.

        Entries whose whole text is a prefix of ``text`` are dropped: the new entry will have all
        their tokens.
        """
        place = bisect_left(self._sorted, (scope, text))
        neighbours = self._equal_entries(place - 1, -1) + self._equal_entries(place, 1)
        entries = [self._entries[key] for key in neighbours if key[0] == scope]
        common, _, closest = max(
            ((common_prefix_length(each.text, text), each.serial, each) for each in entries),
            default=(0, 0, None),
        )

        def is_prefix(index: int) -> bool:
            of, earlier, _ = self._sorted[index]
            return of == scope and text.startswith(earlier)

        first = end = place
        while first > 0 and is_prefix(first - 1):
            first -= 1
        while end < len(self._sorted) and is_prefix(end):
            end += 1
        for _, _, key in self._sorted[first:end]:
            self._drop(key)
        return (closest, common) if common else (None, 0)

    def _equal_entries(self, index: int, step: int) -> list[_Key]:
        """Return the entries from ``index`` in direction ``step`` that have the same scope and text
        as the first."""
        first = index
        keys: list[_Key] = []
        while 0 <= index < len(self._sorted) and self._sorted[index][:2] == self._sorted[first][:2]:
            keys.append(self._sorted[index][2])
            index += step
        return keys

    def _continue(
        self, earlier: _Entry, common: int, text: str, check_length: LengthCheck | None
    ) -> _Entry | None:
        """Return ``text`` with the tokens of ``earlier`` up to the last common anchor, or None if
        that is not possible."""
        for anchor in reversed(earlier.anchors):
            token = earlier.tokens[anchor.token_index]
            if anchor.position + len(self._added[token]) <= common:
                break
        else:
            return None
        rest = self._encode(text[anchor.position :], check_length)
        if check_length is not None:
            check_length(anchor.token_index + len(rest))
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

    def _add_anchors(self, entry: _Entry, start: int, position: int) -> None:
        """Add the anchors from token ``start`` on, whose text begins at ``position``."""
        for index in range(start, len(entry.tokens)):
            added = self._added.get(entry.tokens[index])
            if added is None:
                continue
            position = entry.text.find(added, position)
            if position < 0:
                return
            entry.anchors.append(Anchor(position, index))
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
    common = common_prefix_length(prompt.tokens, earlier.tokens)
    return PrefixComparison(
        len(prompt.tokens),
        len(earlier.tokens),
        common,
        prompt.reused_tokens,
        prompt.tokens[common] if common < len(prompt.tokens) else None,
        earlier.tokens[common] if common < len(earlier.tokens) else None,
    )


def common_prefix_length(one: _Items, other: _Items) -> int:
    """Return the length of the common prefix."""
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
