"""Token ids to text that may be shown: whole characters, cut at stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

_MOST_TOKENS = 64
_CONTEXT_TOKENS = 16
"""How many tokens of a line are decoded again with the next one, and how many are left after that.
Spaces depend on the token before, and characters have four tokens at most."""


class StreamingDetokenizer(Protocol):
    """The part of mlx-lm's streaming detokenizers that is used here."""

    def add_token(self, token: int) -> None: ...
    def finalize(self) -> None: ...
    @property
    def last_segment(self) -> str: ...


class StopScanner:
    """Passes text on up to the first stop string, which is dropped.

    Only text that may be the beginning of a stop string is held back. The first stop string is the
    one that is complete first (the longer one if two end at the same place), so the cut does not
    depend on how the text was split up.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.match: str | None = None  # the stop string that was found

    def feed(self, text: str) -> str:
        """Return the text that can be shown now. After a ``match`` it is empty."""
        if self.match is not None:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        ends = [
            (start + len(stop), start, stop)
            for stop in self._stops
            if (start := text.find(stop)) >= 0
        ]
        if ends:
            _, start, self.match = min(ends)
            self._held = ""
            return text[:start]
        keep = partial_match_length(text, self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """Return what was held back: at the end of the text, it is not a stop string."""
        held, self._held = self._held, ""
        return held


def partial_match_length(text: str, targets: Sequence[str]) -> int:
    """Return the length of the longest end of ``text`` with which a longer target begins."""
    longest = max(map(len, targets), default=0)
    for length in range(min(longest - 1, len(text)), 0, -1):
        end = text[-length:]
        if any(target.startswith(end) for target in targets):
            return length
    return 0


class IncrementalDetokenizer:
    """The text of one sequence while its tokens arrive.

    ``known_texts`` may be shared by all sequences of a model: the texts of tokens that are the same
    wherever they stand, which are filled in here.
    """

    def __init__(
        self,
        detokenizer: StreamingDetokenizer,
        stops: Sequence[str] = (),
        min_tokens: int = 0,
        known_texts: dict[int, str] | None = None,
    ) -> None:
        self._detokenizer = detokenizer
        self._known_texts = {} if known_texts is None else known_texts
        self._is_between = False
        """Whether the next token's text depends on that token alone."""
        self._scanner = StopScanner(stops)
        self._min_tokens = min_tokens
        self.num_tokens = 0
        """Tokens consumed, up to the one that completed a stop string. Later ones do not count."""

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended the text."""
        return self._scanner.match is not None

    @property
    def stop_string(self) -> str | None:
        """The stop string that has ended the text."""
        return self._scanner.match

    def prime(self, prompt: Sequence[int]) -> str:
        """Put ``prompt`` before the text. Return the prompt's own text, without half a character at
        its end."""
        for token in prompt:
            self._add(token)
        return self._read()

    def feed(self, token: int) -> str:
        """Return the text that can be shown now. Once ``stopped``, ignore ``token``."""
        if self.stopped:
            return ""
        self.num_tokens += 1
        segment = self._known_texts.get(token) if self._is_between else None
        if segment is None:
            was_between = self._is_between
            self._add(token)
            segment = self._read()
            if was_between and self._is_between:
                self._known_texts[token] = segment
        return segment if self.num_tokens < self._min_tokens else self._scanner.feed(segment)

    def count_stop_token(self) -> None:
        """Count a token without text: the one that ended the sequence."""
        self.num_tokens += 1

    def finish(self) -> str:
        """Return the rest: what was held back for a character or a stop string to complete."""
        if self.stopped:
            return ""
        try:
            self._detokenizer.finalize()
        except KeyError:
            # mlx-lm's BPE detokenizer raises on a token with characters outside its byte alphabet
            # after half a character. The half character is dropped.
            return self._scanner.flush()
        shown = self._scanner.feed(self._detokenizer.last_segment)
        return shown if self.stopped else shown + self._scanner.flush()

    def _read(self) -> str:
        """Return the text since the last call, and take from mlx-lm's detokenizers what they no
        longer need: with each token they copy, or decode, all that they have.

        Those for BPE and SentencePiece look at no more than whether there was text before, and at
        the bytes of a character that is not whole (``_unflushed``). The one for all other
        tokenizers decodes a line from its beginning.
        """
        detokenizer: Any = self._detokenizer
        segment: str = detokenizer.last_segment
        if hasattr(detokenizer, "_unflushed"):
            if detokenizer.text:
                self._is_between = not detokenizer._unflushed
                detokenizer.text, detokenizer.offset = detokenizer.text[-1:], 1
                detokenizer.tokens.clear()
        elif len(detokenizer.tokens) > _MOST_TOKENS:
            detokenizer._current_tokens = detokenizer._current_tokens[-_CONTEXT_TOKENS:]
            detokenizer._text = detokenizer._current_text = ""
            detokenizer.offset = len(detokenizer.text)
            detokenizer.tokens.clear()
        return segment

    def _add(self, token: int) -> None:
        try:
            self._detokenizer.add_token(token)
        except (IndexError, KeyError, TypeError):
            pass  # an id of a padded vocabulary, which the tokenizer does not know, has no text
