"""One answer: its flight, the text that comes of its tokens, and how likely these were."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from router.fleet.core import Router
from router.fleet.flight import Flight
from router.schemas.objects import FinishReason
from router.tokens.logprobs import Alignment, ScoredToken
from router.tokens.reply import CallDelta, Part, ReplyParser
from router.tokens.text import TextStream


class Piece(NamedTuple):
    """A piece of an answer; ``tokens`` is None where log-probabilities are not asked for."""

    text: str = ""
    tokens: list[ScoredToken] | None = None
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()

    def __bool__(self) -> bool:
        return any(self)

    @classmethod
    def join(cls, pieces: Sequence[Piece]) -> Piece:
        """All of ``pieces`` as one, each call in one piece too."""
        scored = [piece.tokens for piece in pieces if piece.tokens is not None]
        return cls(
            "".join(piece.text for piece in pieces),
            [token for tokens in scored for token in tokens] if scored else None,
            "".join(piece.reasoning for piece in pieces),
            _one_each(call for piece in pieces for call in piece.calls),
        )


def _one_each(deltas: Iterable[CallDelta]) -> tuple[CallDelta, ...]:
    """``deltas`` with one for each call."""
    calls: dict[int, CallDelta] = {}
    for delta in deltas:
        begun = calls.get(delta.number)
        if begun is not None:
            delta = begun._replace(arguments=begun.arguments + delta.arguments)
        calls[delta.number] = delta
    return tuple(calls.values())


class Echo(NamedTuple):
    """A prompt that comes before its answer: its ``text``, and the tokens that are it."""

    text: str
    own_tokens: Sequence[int]


class Choice:
    """One of the answers: a flight and the text that comes out of it.

    ``scored`` is the flight that brings the log-probabilities of the prompt, the same
    for all choices of one prompt. ``finish_reason`` is set once the text is complete.
    """

    def __init__(
        self,
        index: int,
        flight: Flight,
        text: TextStream,
        reply: ReplyParser,
        *,
        scored: Flight,
        alignment: Alignment | None,
        echo: Echo | None,
    ) -> None:
        self.index = index
        self.flight = flight
        self.scored = scored
        self._text = text
        self._reply = reply
        self._alignment = alignment
        self._echo = echo
        self._shown = 0
        self._read = 0
        self._cut = False
        self.reasoning_tokens = 0
        self.finish_reason: FinishReason | None = None

    @property
    def completion_tokens(self) -> int:
        return self._text.tokens

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended it."""
        return self._text.stop_string

    @property
    def output(self) -> list[int]:
        """The tokens that its text is made of, and the one that ended it."""
        return self.flight.tokens[: self._text.tokens]

    def advance(self, router: Router) -> Piece:
        """What has become certain since the last call. Raises the flight's error."""
        if self.finish_reason is not None:
            return Piece()
        parts: list[Part] = []
        if self._echo is not None:
            if self._alignment is not None and not self.scored.prompt_scored:
                return self._not_yet()
            parts.append(self._take(self._begin(self._echo)))
            self._echo = None
        self._advance(router, parts)
        tokens = None
        if self._alignment is not None:
            tokens = self._alignment.shown(self._shown)
            if self.finish_reason is not None and not self._text.stopped and not self._cut:
                tokens += self._alignment.rest()
        return Piece(
            "".join(part.text for part in parts),
            tokens,
            "".join(part.reasoning for part in parts),
            _one_each(call for part in parts for call in part.calls),
        )

    def _take(self, shown: str) -> Part:
        self._shown += len(shown)
        return self._reply.feed(shown)

    def _not_yet(self) -> Piece:
        for flight in (self.flight, self.scored):
            if flight.error is not None:
                raise flight.error
        return Piece()

    def _begin(self, echo: Echo) -> str:
        """The prompt's text; its tokens, and what it holds back, go out with what follows."""
        whole = self._text.begin(echo.own_tokens)
        if self._alignment is not None:
            prompt, scores = self.flight.order.prompt, self.scored.prompt_logprobs
            self._alignment.begin(prompt, scores, echo.text)
        start = echo.text.find(whole)
        return echo.text[: start + len(whole)] if start >= 0 else whole

    def _advance(self, router: Router, parts: list[Part]) -> None:
        """Adds what the new tokens became to ``parts``."""
        flight = self.flight
        new = [] if self._cut else flight.tokens[self._read :]
        scores = flight.logprobs[self._read :]
        self._read = len(flight.tokens)
        silent = flight.done and flight.stop_token is not None and bool(new)
        audible = new[:-1] if silent else new
        for token in audible:
            if self._text.stopped or self._reply.complete:
                break
            self.reasoning_tokens += self._reply.in_reasoning
            parts.append(self._take(self._text.feed(token)))
        if self._alignment is not None and audible:
            self._alignment.add(audible, scores[: len(audible)])
        if (self._text.stopped or self._reply.complete) and not self._cut:
            self._cut = True
            router.dispatcher.cut(flight)
        if not flight.done:
            return
        if flight.error is not None and not self._cut:
            raise flight.error
        if silent and not self._cut:
            self._text.count_silent()
        parts.append(self._take(self._text.finish()))
        limited = flight.finish == "length" and not self._text.stopped and not self._cut
        parts.append(self._reply.finish(cut=limited or self._text.stopped))
        if limited:
            self.finish_reason = "length"
        else:
            self.finish_reason = "tool_calls" if self._reply.called else "stop"
