"""From token ids to text that may be shown: whole characters, cut at stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class StreamingDetokenizer(Protocol):
    """The part of mlx-lm's streaming detokenizers that is used here."""

    def add_token(self, token: int) -> None: ...
    def finalize(self) -> None: ...
    @property
    def last_segment(self) -> str: ...


class StopScanner:
    """Passes text on up to the first stop string, which it swallows.

    What could still become a stop string is held back, and nothing else. The
    first stop string is the one that is complete first (the longer one, when two
    end at once), so the cut does not depend on how the text was split up.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.match: str | None = None
        """The stop string that was found."""

    def feed(self, text: str) -> str:
        """The text that can be shown now. After a ``match`` it is always empty."""
        if self.match is not None or not self._stops:
            return "" if self.match is not None else text
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
        """The end of the text has come: what was held back is no stop string."""
        held, self._held = self._held, ""
        return held


def partial_match_length(text: str, wanted: Sequence[str]) -> int:
    """The length of the longest end of ``text`` that begins one of ``wanted``, and is not all of
    it."""
    longest = max(map(len, wanted), default=0)
    for length in range(min(longest - 1, len(text)), 0, -1):
        end = text[-length:]
        if any(each.startswith(end) for each in wanted):
            return length
    return 0


class IncrementalDetokenizer:
    """The text of one sequence as its tokens come.

    ``num_tokens`` counts those consumed, up to and with the one that completed a stop
    string: what comes after that is ignored.
    """

    def __init__(
        self, detokenizer: StreamingDetokenizer, stops: Sequence[str] = (), min_tokens: int = 0
    ) -> None:
        self._detokenizer = detokenizer
        self._scanner = StopScanner(stops)
        self._min_tokens = min_tokens
        self.num_tokens = 0

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended the text."""
        return self._scanner.match is not None

    @property
    def stop_string(self) -> str | None:
        """The stop string that has ended the text."""
        return self._scanner.match

    def prime(self, prompt: Sequence[int]) -> str:
        """Lets the text go on after ``prompt``, and returns what is whole of the prompt's own."""
        for token in prompt:
            self._add(token)
        return self._detokenizer.last_segment

    def feed(self, token: int) -> str:
        """What can be shown now. After ``stopped`` it is always empty, and nothing counts."""
        if self.stopped:
            return ""
        self.num_tokens += 1
        self._add(token)
        segment = self._detokenizer.last_segment
        return segment if self.num_tokens < self._min_tokens else self._scanner.feed(segment)

    def count_stop_token(self) -> None:
        """A token that is no text: the one that ended the sequence."""
        self.num_tokens += 1

    def finish(self) -> str:
        """The rest: what was held back for a character or a stop string to complete."""
        if self.stopped:
            return ""
        try:
            self._detokenizer.finalize()
        except KeyError:
            # mlx-lm's BPE detokenizer, on a token with characters outside its byte
            # alphabet after half a character: the half character is no text.
            return self._scanner.flush()
        shown = self._scanner.feed(self._detokenizer.last_segment)
        return shown if self.stopped else shown + self._scanner.flush()

    def _add(self, token: int) -> None:
        try:
            self._detokenizer.add_token(token)
        except (IndexError, KeyError, TypeError):
            pass  # an id of a padded vocabulary that the tokenizer does not know: no text
