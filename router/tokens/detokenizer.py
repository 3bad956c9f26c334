"""Token ids to final text: complete characters, cut at stop strings."""

from __future__ import annotations

from collections.abc import Sequence

from router.tokens.decoders import TokenDecoder


class StopScanner:
    """Passes text through up to the first stop string, which is dropped.

    Only text that may be the start of a stop string is held back. The first stop string is the one
    that is complete first (the longer one if two end at the same position), so the result does not
    depend on how the text is split.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.match: str | None = None  # the stop string that was found

    def feed(self, text: str) -> str:
        """Return the text that is final. Empty after a ``match``."""
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
        """Return the text held back: at the end, it can no longer become a stop string."""
        held, self._held = self._held, ""
        return held


def partial_match_length(text: str, targets: Sequence[str]) -> int:
    """Return the length of the longest end of ``text`` that is the start of a longer target."""
    longest = max(map(len, targets), default=0)
    for length in range(min(longest - 1, len(text)), 0, -1):
        end = text[-length:]
        if any(target.startswith(end) for target in targets):
            return length
    return 0


class IncrementalDetokenizer:
    """The text of one sequence as its tokens arrive, up to a stop string."""

    def __init__(
        self, decoder: TokenDecoder, stops: Sequence[str] = (), min_tokens: int = 0
    ) -> None:
        self._decoder = decoder
        self._scanner = StopScanner(stops)
        self._min_tokens = min_tokens
        self.num_tokens = 0
        """Tokens consumed, up to the one that completed a stop string. Later ones are
        not counted."""

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended the text."""
        return self._scanner.match is not None

    @property
    def stop_string(self) -> str | None:
        """The stop string that has ended the text."""
        return self._scanner.match

    def prime(self, prompt: Sequence[int]) -> str:
        """Put ``prompt`` before the text. Return the prompt's own text, without an incomplete
        character at its end."""
        return "".join(map(self._decoder.add, prompt))

    def feed(self, token: int) -> str:
        """Return the text that is final. Once ``stopped``, ignore ``token``."""
        if self.stopped:
            return ""
        self.num_tokens += 1
        text = self._decoder.add(token)
        return text if self.num_tokens < self._min_tokens else self._scanner.feed(text)

    def count_stop_token(self) -> None:
        """Count a token without text, which ended the sequence."""
        self.num_tokens += 1

    def finish(self) -> str:
        """Return the rest: text held back for an incomplete character or stop string."""
        if self.stopped:
            return ""
        shown = self._scanner.feed(self._decoder.finish())
        return shown if self.stopped else shown + self._scanner.flush()
