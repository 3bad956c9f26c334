"""A choice that is read on a thread while its sequence receives tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from router.fleet.sequences.remote_sequence import RemoteSequence
from router.fleet.tenants.tenant import EVERYBODY
from router.generation.choice import Choice, OutputDelta
from router.tokens.detokenizer import IncrementalDetokenizer
from router.tokens.image_prompts import Prompt
from router.tokens.logprobs import TokenAligner
from router.tokens.reply_parser import PlainReplyParser
from router.tokens.vocabulary import Vocabulary
from shared.wire import Delta
from tests.router.scripted_engine import make_submit, scores_of
from tests.router.tiny_tokenizer import EOS


class InterruptedTokens(list[int]):
    """Tokens after whose arrival the interpreter switches to the thread that reads them."""

    choice: Choice
    read: list[OutputDelta]

    def extend_and_read(self, more: list[int]) -> InterruptedTokens:
        self.extend(more)
        self.read.append(self.choice.advance())
        return self

    __iadd__ = extend_and_read  # type: ignore[assignment]


def choice_of(
    sequence: RemoteSequence,
    text: IncrementalDetokenizer,
    reply: Any,
    aligner: TokenAligner | None = None,
) -> Choice:
    return Choice(
        *(0, sequence, text, reply),
        stop=RemoteSequence.end,
        prompt_logprobs_source=sequence,
        aligner=aligner,
        echo=None,
        reports_progress=False,
        prompt=Prompt.of_text([1]),
    )


def advanced(choice: Choice, tokens: list[int], steps: Iterable[int]) -> list[OutputDelta]:
    """Return the output of ``choice``, whose tokens arrive in ``steps``."""
    sequence, found = choice.sequence, []
    for step in steps:
        start = len(sequence.output_token_ids)
        if sequence.done or start == len(tokens):
            break
        own, end = tokens[start : start + step], start + step >= len(tokens)
        scores = [scores_of(token, 0, 0) for token in own]  # ignored if they are not requested
        ended: Any = {"finish": "stop"} if end else {}
        delta = Delta(
            request_id="r", attempt=0, index=start, token_ids=own, logprobs=scores, **ended
        )
        sequence.apply(delta, 0.0)
        found.append(choice.advance())
        while choice.behind:
            found.append(choice.advance())
    return [*found, choice.advance()]


@pytest.mark.parametrize("alone", [False, True])
def test_a_stop_token_is_never_text(loaded: Any, vocabulary: Vocabulary, alone: bool) -> None:
    sequence = RemoteSequence(make_submit("r", max_tokens=9), EVERYBODY, lambda: None)
    choice = choice_of(sequence, IncrementalDetokenizer(vocabulary.decoder()), PlainReplyParser())
    sequence.output_token_ids = tokens = InterruptedTokens()
    tokens.choice, tokens.read = choice, []
    text = loaded.encode("hello", add_special_tokens=False)
    last = [EOS] if alone else [*text, EOS]
    deltas = [text, last] if alone else [last]
    for own in deltas:
        end: Any = {"finish": "stop", "stop_token": EOS} if own is last else {}
        delta = Delta(request_id="r", attempt=0, index=len(tokens), token_ids=own, **end)
        sequence.apply(delta, 0.0)
    found = OutputDelta.join([*tokens.read, choice.advance()])
    assert (found.text, choice.finish_reason) == ("hello", "stop")
    assert choice.completion_tokens == len(text) + 1
