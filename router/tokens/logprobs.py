"""Log-probabilities of tokens, aligned with the text."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from functools import cache
from typing import NamedTuple, TypeVar, cast

import msgspec
from msgspec import Raw
from msgspec.structs import asdict

from router.schemas.completions import (
    ChatCompletionTokenLogprob,
    ChatLogprobs,
    PromptLogprob,
    TextLogprobs,
    TopLogprob,
)
from router.tokens.vocabulary import Vocabulary
from shared.wire import TokenLogprobs

MIN_LOGPROB = -9999.0
"""The logarithm of zero probability, as in OpenAI's answers: JSON has no infinity."""

_Position = TypeVar("_Position")


class ScoredToken(msgspec.Struct, frozen=True, gc=False):
    """A token with its position in the text and its log-probabilities."""

    id: int
    offset: int  # offset of its text, in characters of the whole text
    logprobs: TokenLogprobs | None  # None for the first token of a prompt


class TokenAligner:
    """Returns tokens along with their text.

    Text may lag behind its tokens, by an incomplete character or the start of a stop string. A
    token is returned with the first text that shows a part of it. A text that ``continues`` another
    one keeps its leading space.
    """

    def __init__(self, vocabulary: Vocabulary, continues: bool = False) -> None:
        self._vocabulary = vocabulary
        self._decoder = vocabulary.byte_decoder(vocabulary.trims_space and not continues)
        self._pending: deque[ScoredToken] = deque()
        self._length = 0  # of the text, in characters

    def add_prompt(
        self, prompt: Sequence[int], logprobs: Iterable[TokenLogprobs], text: str
    ) -> None:
        """Add the prompt before all other tokens. ``text`` is the part of it that the answer
        repeats."""
        whole = "".join(map(self._vocabulary.byte_decoder(False).add, prompt))
        # A tokenizer may add a BOS token or a space at the start that is not in the text.
        ahead = len(whole) - len(text) if whole.endswith(text) else 0
        self._decoder = self._vocabulary.byte_decoder(False)
        position = 0
        for token, own in zip(prompt, [None, *logprobs], strict=True):
            offset = min(max(0, position - ahead), len(text))
            self._pending.append(ScoredToken(token, offset, own))
            position += len(self._decoder.add(token))
        self._length = len(text)

    def add(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> None:
        """Add output tokens."""
        for token, own in zip(tokens, logprobs, strict=True):
            self._pending.append(ScoredToken(token, self._length, own))
            self._length += len(self._decoder.add(token))

    def take(self, length: int) -> list[ScoredToken]:
        """Return the tokens that begin within the first ``length`` characters, once each."""
        out = []
        while self._pending and self._pending[0].offset < length:
            out.append(self._pending.popleft())
        return out

    def take_rest(self) -> list[ScoredToken]:
        """Return all remaining tokens, at the end of the text, which have no text."""
        out = list(self._pending)
        self._pending.clear()
        return out


class LogprobsContext(NamedTuple):
    """The options for log-probabilities in the answer."""

    vocabulary: Vocabulary
    num_logprobs: int  # alternatives for each token


def chat_logprobs(tokens: Sequence[ScoredToken], context: LogprobsContext) -> ChatLogprobs:
    """Return log-probabilities in the format of chat completions."""
    vocabulary, count = context

    def named(token: int, logprob: float) -> TopLogprob:
        return TopLogprob(
            token=vocabulary.token_text(token),
            logprob=max(logprob, MIN_LOGPROB),
            bytes=list(vocabulary.token_bytes(token)),
        )

    content = []
    for token in tokens:
        if token.logprobs is not None:
            own = named(token.id, token.logprobs.chosen)
            others = list(zip(token.logprobs.top_ids, token.logprobs.top, strict=True))[:count]
            top = [named(*other) for other in others]
            scored = ChatCompletionTokenLogprob(**asdict(own), top_logprobs=top)
            content.append(_encoded(scored))
    return ChatLogprobs(content)


def text_logprobs(tokens: Sequence[ScoredToken], context: LogprobsContext) -> TextLogprobs:
    """Return log-probabilities in the format of text completions: a token's alternatives include
    the token itself, even if it is not among the most likely."""
    vocabulary, count = context
    name = cache(vocabulary.unique_name)

    def alternatives(token: ScoredToken) -> dict[str, float] | None:
        if token.logprobs is None:
            return None
        found = _alternatives(token.id, token.logprobs, count)
        return _encoded({name(other): max(logprob, MIN_LOGPROB) for other, logprob in found})

    return TextLogprobs(
        tokens=[name(token.id) for token in tokens],
        token_logprobs=[
            None if token.logprobs is None else max(token.logprobs.chosen, MIN_LOGPROB)
            for token in tokens
        ],
        top_logprobs=[alternatives(token) for token in tokens],
        text_offset=[token.offset for token in tokens],
    )


def encoded_prompt_logprobs(
    prompt: Sequence[int], logprobs: Iterable[TokenLogprobs], context: LogprobsContext
) -> bytes:
    """Return log-probabilities of a prompt in vLLM's format, `PromptLogprobs`, as JSON."""
    vocabulary, count = context
    token_text = cache(vocabulary.token_text)
    out = [b"null"]
    for token, own in zip(prompt[1:], logprobs, strict=True):
        ranks = {other: rank for rank, other in enumerate(own.top_ids, 1)}
        position: dict[str, PromptLogprob] = {
            str(other): PromptLogprob(
                logprob=max(logprob, MIN_LOGPROB),
                rank=ranks.get(other),
                decoded_token=token_text(other),
            )
            for other, logprob in _alternatives(token, own, count)
        }
        out.append(msgspec.json.encode(position))
    return b"[" + b",".join(out) + b"]"


def _encoded(position: _Position) -> _Position:
    """Return ``position`` as JSON, the form in which it is put into an answer.

    A hundred thousand positions as objects would take some hundred bytes per alternative, and
    encoding them would block all other threads.
    """
    return cast(_Position, Raw(msgspec.json.encode(position)))


def _alternatives(token: int, scores: TokenLogprobs, count: int) -> list[tuple[int, float]]:
    """Return the ``count`` most likely tokens, and ``token`` if it is not one of them."""
    alternatives = dict(zip(scores.top_ids[:count], scores.top[:count], strict=True))
    alternatives.setdefault(token, scores.chosen)
    return list(alternatives.items())
