"""One choice of an answer: its sequence, its text, and its log-probabilities."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import NamedTuple

from router.fleet.sequences.remote_sequence import RemoteSequence
from router.schemas.completions import ComputedPrompt, FinishReason
from router.tokens.detokenizer import IncrementalDetokenizer
from router.tokens.image_prompts import Prompt
from router.tokens.logprobs import ScoredToken, TokenAligner
from router.tokens.rendering import Renderer
from router.tokens.reply_parser import CallDelta, ReplyDelta, ReplyParser

_MAX_TOKENS = 256
"""Max number of tokens read at a time: thousands may be queued for a slow client."""
_CHARS_PER_TOKEN = 4
_INLINE_PARSE_WORK = 200_000
"""Max number of characters parsed on the event loop: about 10 ms."""


class OutputDelta(NamedTuple):
    """A piece of the output of a choice."""

    parts: tuple[ReplyDelta, ...] = ()
    """In the order in which the model wrote them. `text`, `reasoning` and `calls` are those of all
    parts, for APIs whose answers have one of each."""
    tokens: list[ScoredToken] | None = None
    """None if log-probabilities are not requested."""
    progress: ComputedPrompt | None = None
    """Of the prompt, before all parts."""

    def __bool__(self) -> bool:
        return any(self)

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts)

    @property
    def reasoning(self) -> str:
        return "".join(part.reasoning for part in self.parts)

    @property
    def calls(self) -> tuple[CallDelta, ...]:
        """One delta for each tool call."""
        return _calls(self.parts)

    def split(self) -> list[OutputDelta]:
        """Return the output in pieces of one kind each, in their order: progress, reasoning, text,
        or a part of one call. Clients read one of them from an event."""
        if self.progress is not None:
            rest = self._replace(progress=None)
            return [OutputDelta(progress=self.progress), *(rest.split() if rest else ())]
        if len(self.parts) < 2 and len(self.calls) < 2:  # the usual case in a stream
            return [self]
        parts: list[ReplyDelta] = []
        for part in self.parts:
            if part.reasoning:
                parts.append(ReplyDelta(reasoning=part.reasoning))
            if part.text:
                parts.append(ReplyDelta(text=part.text, spans=part.spans))
            parts += (ReplyDelta(calls=(call,)) for call in part.calls)
        first, *others = parts
        return [OutputDelta((first,), self.tokens), *(OutputDelta((each,)) for each in others)]

    def without_reasoning(self) -> OutputDelta:
        parts = tuple(part._replace(reasoning="") for part in self.parts)
        return self._replace(parts=tuple(filter(any, parts)))

    @classmethod
    def join(cls, deltas: Sequence[OutputDelta]) -> OutputDelta:
        """Return ``deltas`` merged into one."""
        scored = [delta.tokens for delta in deltas if delta.tokens is not None]
        tokens = [token for tokens in scored for token in tokens] if scored else None
        return cls(_merged([part for delta in deltas for part in delta.parts]), tokens)


def _merged(parts: Sequence[ReplyDelta]) -> tuple[ReplyDelta, ...]:
    """Return ``parts`` with successive parts of one kind merged."""
    if len(parts) < 2:  # the usual case in a stream
        return tuple(parts)
    runs = groupby(parts, key=lambda part: (bool(part.reasoning), bool(part.text)))
    return tuple(_joined(list(run)) for _, run in runs)


def _joined(parts: Sequence[ReplyDelta]) -> ReplyDelta:
    return ReplyDelta(
        "".join(part.reasoning for part in parts),
        "".join(part.text for part in parts),
        _calls(parts),
        [span for part in parts for span in part.spans],
    )


def _calls(parts: Sequence[ReplyDelta]) -> tuple[CallDelta, ...]:
    pieces: dict[int, list[CallDelta]] = {}
    for call in (call for part in parts for call in part.calls):
        pieces.setdefault(call.number, []).append(call)
    return tuple(
        each[0]._replace(arguments="".join(piece.arguments for piece in each))
        for each in pieces.values()
    )


class Echo(NamedTuple):
    """A prompt that is repeated at the start of its answer."""

    text: str
    tokens: Sequence[int]
    """The tokens of ``text``."""

    @classmethod
    def of(cls, prompt: str | list[int], tokens: list[int], renderer: Renderer) -> Echo:
        """Return the echo of ``prompt``, tokenized as ``tokens``."""
        if isinstance(prompt, str):
            return cls(prompt, renderer.without_bos(prompt, tokens))
        return cls(renderer.vocabulary.decode(tokens), tokens)


class Choice:
    """One choice: a sequence and the text of its tokens."""

    def __init__(
        self,
        index: int,
        sequence: RemoteSequence,
        detokenizer: IncrementalDetokenizer,
        parser: ReplyParser,
        *,
        prompt: Prompt,
        stop: Callable[[RemoteSequence], None],
        prompt_logprobs_source: RemoteSequence,
        aligner: TokenAligner | None,
        echo: Echo | None,
        reports_progress: bool,
    ) -> None:
        self.index = index
        self.sequence = sequence
        self.prompt = prompt
        self.prompt_logprobs_source = prompt_logprobs_source
        """The sequence that carries the prompt's log-probabilities: the first one of
        each prompt."""
        self._stop = stop
        self._detokenizer = detokenizer
        self._parser = parser
        self._aligner = aligner
        self._echo = echo
        self._echoed: list[ReplyDelta] = []
        """The echo of the prompt, until it is returned."""
        self._progress: tuple[int, int] | None = None
        """The tokens of the prompt that were reported as computed, and as found."""
        self._reports_progress = reports_progress
        """Whether there is more to report."""
        self._chars_shown = 0
        self._tokens_read = 0
        self._stop_requested = False
        self.reasoning_tokens = 0
        self.finish_reason: FinishReason | None = None
        """Set once the text is complete."""

    @property
    def completion_tokens(self) -> int:
        return self._detokenizer.num_tokens

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text, if any."""
        return self._detokenizer.stop_string

    @property
    def output_token_ids(self) -> list[int]:
        """The tokens of the text, including the one that ended it."""
        return self.sequence.output_token_ids[: self._detokenizer.num_tokens]

    def advance(self) -> OutputDelta:
        """Return the output that became final since the last call. Raises the sequence's error."""
        if self.finish_reason is not None:
            return OutputDelta()
        progress = self._new_progress() if self._reports_progress else None
        if self._echo is not None:
            self._raise_error()
            return OutputDelta(progress=progress)
        parsed, self._echoed = self._echoed, []
        self._advance(parsed)
        tokens = None
        if self._aligner is not None:
            tokens = self._aligner.take(self._chars_shown)
            if self.finish_reason is not None and not self._cut_short:
                tokens += self._aligner.take_rest()
        return OutputDelta(_merged(parsed), tokens, progress)

    @property
    def is_complete(self) -> bool:
        """Whether the text has ended before what the model may write after it."""
        return self._parser.complete

    @property
    def behind(self) -> bool:
        """Whether tokens are left for the next `advance`."""
        waits = self._echo is not None or self.finish_reason is not None
        return not waits and self._tokens_read < len(self.sequence.output_token_ids)

    @property
    def is_slow(self) -> bool:
        """Whether `advance` may be slow enough to need a thread: some parts of calls are read
        only when they are complete."""
        unread = len(self.sequence.output_token_ids) - self._tokens_read
        work = self._parser.parse_work(min(unread, _MAX_TOKENS) * _CHARS_PER_TOKEN)
        return work > _INLINE_PARSE_WORK

    @property
    def echo_is_due(self) -> bool:
        """Whether `begin_echo` must be called before anything can be returned."""
        scored = self._aligner is not None
        return self._echo is not None and (
            not scored or self.prompt_logprobs_source.has_prompt_logprobs
        )

    def begin_echo(self) -> None:
        """Repeat the prompt, which takes some microseconds per token."""
        assert self._echo is not None
        self._echoed += self._parse(self._begin_echo(self._echo))
        self._echo = None

    @property
    def _cut_short(self) -> bool:
        """Whether the text ended before its sequence ended by itself."""
        return self._detokenizer.stopped or self._stop_requested

    def _parse(self, shown: str) -> list[ReplyDelta]:
        self._chars_shown += len(shown)
        return self._parser.feed(shown)

    def _new_progress(self) -> ComputedPrompt | None:
        """Return what changed since the last report; the last one is of the whole prompt."""
        sequence = self.sequence
        computed, total = sequence.computed_prompt_tokens, sequence.num_prompt_tokens
        if computed is None or (computed, sequence.cached_tokens) == self._progress:
            return None
        self._progress = computed, sequence.cached_tokens
        self._reports_progress = computed < total
        passed_s = (sequence.first_token_at or time.monotonic()) - sequence.placed_at
        return ComputedPrompt(
            total=total,
            cache=sequence.cached_tokens,
            processed=computed,
            time_ms=max(0, round(passed_s * 1000)),
        )

    def _raise_error(self) -> None:
        for sequence in (self.sequence, self.prompt_logprobs_source):
            if sequence.error is not None:
                raise sequence.error

    def _begin_echo(self, echo: Echo) -> str:
        """Return the text of the prompt, except for what the detokenizer holds back.

        The rest, and the prompt's tokens, are returned with the text that follows.
        """
        whole = self._detokenizer.prime(echo.tokens)
        if self._aligner is not None:
            logprobs = self.prompt_logprobs_source.prompt_logprobs
            self._aligner.add_prompt(self.sequence.submit.token_ids, logprobs, echo.text)
        start = echo.text.find(whole)
        return echo.text[: start + len(whole)] if start >= 0 else whole

    def _advance(self, parsed: list[ReplyDelta]) -> None:
        """Add the output of the new tokens to ``parsed``."""
        sequence = self.sequence
        detokenizer, parser = self._detokenizer, self._parser
        start, end = self._tokens_read, sequence.num_readable_tokens  # read before `done`
        if not self._stop_requested:
            end = min(end, start + _MAX_TOKENS)
        new = [] if self._stop_requested else sequence.output_token_ids[start:end]
        self._tokens_read = end
        at_end = sequence.done and not self.behind
        ends_with_stop_token = at_end and sequence.stop_token is not None and bool(new)
        text_tokens = new[:-1] if ends_with_stop_token else new
        for token in text_tokens:
            if detokenizer.stopped or parser.complete:
                break
            self.reasoning_tokens += parser.in_reasoning
            parsed += self._parse(detokenizer.feed(token))
        if self._aligner is not None and text_tokens:
            logprobs = sequence.logprobs[start : start + len(text_tokens)]
            self._aligner.add(text_tokens, logprobs)
        if (detokenizer.stopped or parser.complete) and not self._stop_requested:
            self._stop_requested = True
            self._stop(sequence)
        if self._stop_requested:
            self._tokens_read = len(sequence.output_token_ids)
        elif not at_end:
            return
        if not sequence.done:
            return
        if sequence.error is not None and not self._stop_requested:
            raise sequence.error
        if ends_with_stop_token and not self._stop_requested:
            detokenizer.count_stop_token()
        parsed += self._parse(detokenizer.finish())
        limited = sequence.finish_reason == "length" and not self._cut_short
        parsed += parser.finish(cut=limited or detokenizer.stopped)
        if limited:
            self.finish_reason = "length"
        else:
            self.finish_reason = "tool_calls" if parser.called else "stop"
