"""Answers as lists of items or blocks: the same at any number of tokens per step."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import pytest

from router.anthropic.output import ContentBlockBuilder
from router.api.output import OutputBuilder
from router.fleet.sequences.remote_sequence import RemoteSequence
from router.fleet.tenants.tenant import EVERYBODY
from router.generation.choice import OutputDelta
from router.responses.output import OutputItemBuilder
from router.tokens.detokenizer import IncrementalDetokenizer
from router.tokens.logprobs import LogprobsContext, TokenAligner, chat_logprobs
from router.tokens.parsing.marked import MarkedReplyParser
from router.tokens.vocabulary import Vocabulary
from tests.router.generation.test_choice import advanced, choice_of
from tests.router.scripted_engine import make_submit
from tests.router.tokens.parsing.replies import TOOLS
from tests.router.tokens.parsing.test_marked import format_of

CHAT_MODEL = True
ARGUMENTS = '{"city": "Berlin"}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
START = "<|start|>assistant<|channel|>"
WRITTEN = {
    f"<think>\nI look.\n</think>\n\nLet me check.\n{CALL}\nNow I wait.\n{CALL}{CALL}\nDone.": (
        "json_tools",
        ["I look.", "Let me check.", ARGUMENTS, "\n\nNow I wait.", *[ARGUMENTS] * 2, "\n\nDone."],
    ),
    "<|channel|>commentary<|message|>Let me check.<|end|>"
    f"{START}analysis<|message|>I look.<|end|>{START}final<|message|>Done.": (
        "harmony",
        ["Let me check.", "I look.", "Done."],
    ),
}


def random_steps(draw: random.Random) -> Iterator[int]:
    while True:
        yield draw.choice((1, 2, 9, 60))


def deltas_of(
    tokenizer: Any, written: str, parser: str, steps: Iterable[int], *, scored: bool = False
) -> list[OutputDelta]:
    """Return the output of a choice, whose tokens arrive in ``steps``."""
    format, vocabulary = format_of(parser), Vocabulary(tokenizer)
    ids = tokenizer.encode(written, add_special_tokens=False)
    submit = make_submit("r", max_tokens=len(ids), logprobs=0 if scored else None)
    sequence = RemoteSequence(submit, EVERYBODY, lambda: None)
    reply = MarkedReplyParser(format, format.initial_state, TOOLS)
    text = IncrementalDetokenizer(vocabulary.decoder())
    aligner = TokenAligner(vocabulary) if scored else None
    return advanced(choice_of(sequence, text, reply, aligner), ids, steps)


def texts_of(builder: OutputBuilder[Any, Any], deltas: Iterable[OutputDelta]) -> list[str]:
    """Return the texts of the items of ``deltas``, and the arguments of calls."""
    for delta in deltas:
        builder.feed(delta)
    builder.finish()
    return [text_of(msgspec.to_builtins(item)) for item in builder.finished]


def text_of(item: Any) -> str:
    match item:
        case (
            {"content": [{"text": str(text)}]}
            | {"text": str(text)}
            | {"thinking": str(text)}
            | {"arguments": str(text)}
        ):
            return text
    return json.dumps(item["input"])


@pytest.mark.parametrize("written", WRITTEN)
def test_items_are_in_the_order_of_the_text(loaded: Any, written: str) -> None:
    parser, expected = WRITTEN[written]
    draw = random.Random(1)
    for _ in range(20):
        deltas = deltas_of(loaded, written, parser, random_steps(draw))
        for given in (deltas, [OutputDelta.join(deltas)]):
            assert texts_of(OutputItemBuilder(summarized=False), given) == expected
            assert texts_of(ContentBlockBuilder(show_thinking=True), given) == expected


def scored_texts(context: LogprobsContext, deltas: Iterable[OutputDelta]) -> list[tuple[str, str]]:
    """Return the text of each message, and that of the tokens in its log-probabilities."""
    builder = OutputItemBuilder(summarized=False)
    for delta in deltas:
        builder.feed(delta, chat_logprobs(delta.tokens or [], context).content)
    builder.finish()
    items = json.loads(msgspec.json.encode(builder.finished))
    parts = [item["content"][0] for item in items if item["type"] == "message"]
    tokens = [b"".join(bytes(each["bytes"]) for each in part["logprobs"]) for part in parts]
    return [(part["text"], own.decode()) for part, own in zip(parts, tokens, strict=True)]


@pytest.mark.parametrize(
    ("written", "parser"),
    [
        *((written, parser) for written, (parser, _) in WRITTEN.items()),
        ("hello\n\nworld é <th> <tool_call>x</tool_call> 🌍 \n", "json_tools"),
        ("\n", "json_tools"),
        (f"{CALL}\n<think>a</think>\nb", "json_tools"),
    ],
)
def test_log_probabilities_are_those_of_the_text(loaded: Any, written: str, parser: str) -> None:
    draw, context = random.Random(1), LogprobsContext(Vocabulary(loaded), 0)
    for _ in range(20):
        deltas = deltas_of(loaded, written, parser, random_steps(draw), scored=True)
        for given in (deltas, [OutputDelta.join(deltas)]):
            found = scored_texts(context, given)
            assert found and all(text == scored for text, scored in found)
