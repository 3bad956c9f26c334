"""Replies that were read wrongly before, each with what it means."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from router.tokens.parsing.formats import (
    CALL_FORMATS,
    HARMONY,
    REASONING,
    Marker,
    ReplyFormat,
    ReplyState,
)
from router.tokens.parsing.marked import MarkedReplyParser
from tests.router.tokens.parsing.test_marked import named, read_with

CASES = [
    json.loads(line)
    for line in (Path(__file__).parent / "reply_cases.jsonl").read_text("utf-8").splitlines()
]
"""``calls`` is "begun" if the reply is cut within its first call."""
STRING = {"type": "string"}
PROPERTIES: dict[str, Any] = {"s": STRING, "t": STRING, "n": {"type": "number"}, "u": {}}
PROPERTIES |= {"i": {"type": "integer"}, "b": {"type": "boolean"}, "o": {"type": "object"}}
PROPERTIES |= {"a": {"type": "array"}, "nul": {"type": ["string", "null"]}}
PROPERTIES |= {"e": {"enum": ["x", "y", "1"]}, "ls": {"type": "array", "items": STRING}}


def tool(name: str, properties: Any) -> dict[str, Any]:
    if isinstance(properties, list):
        properties = dict.fromkeys(properties, STRING)
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def format_of(case: dict[str, Any]) -> ReplyFormat:
    if case["parser"] == "harmony":
        return HARMONY
    think = REASONING[case.get("think", "think")]
    end = {ReplyState.NORMAL: (Marker(think.end, ReplyState.NORMAL),)}
    transitions = end if case["parser"] == "minimax_m3" else None
    return ReplyFormat(think, CALL_FORMATS[case["parser"]], transitions)


def pieces_of(text: str) -> list[list[str]]:
    draw = random.Random(text)
    found = [[text[at : at + size] for at in range(0, len(text), size)] for size in (1, 2, 3, 7)]
    for _ in range(12):
        places = sorted(draw.randrange(len(text) + 1) for _ in range(3))
        ends = zip([0, *places], [*places, len(text)], strict=True)
        found.append([text[start:end] for start, end in ends if start < end])
    return [*found, [text]]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['parser']}: {case['text'][:40]}")
def test_a_reply_means_what_it_says(case: dict[str, Any]) -> None:
    format, text = format_of(case), case["text"]
    tools = case.get("tools") or ["f", "g"]
    tools = tools if isinstance(tools, dict) else dict.fromkeys(tools, PROPERTIES)
    state = ReplyState(case["state"]) if "state" in case else format.initial_state
    cut = case.get("cut", False)
    for pieces in pieces_of(text):
        reply = MarkedReplyParser(
            format,
            state,
            [tool(*each) for each in tools.items()],
            single_call=case.get("single", False),
            only_calls=case.get("only", False),
        )
        part = read_with(reply, pieces, cut=cut)
        calls = [list(each) for each in named(part.calls)]
        if case["calls"] == "begun":
            assert [name for name, _ in calls] in ([], ["f"])
        else:
            assert calls == case["calls"]
        assert (
            "content" not in case or (part.text.rstrip() if cut else part.text) == case["content"]
        )
        assert part.reasoning == case.get("reasoning", part.reasoning)


def test_a_long_list_of_texts_like_calls_is_a_list() -> None:
    texts = ["call: x"] * 700
    written = ",".join(f'<|"|>{text}<|"|>' for text in texts)
    reply = MarkedReplyParser(
        format_of({"parser": "gemma4"}), ReplyState.NORMAL, [tool("f", PROPERTIES)]
    )
    part = read_with(reply, [f"<|tool_call>call:f{{ls:[{written}]}}<tool_call|>"])
    assert named(part.calls) == [("f", {"ls": texts})]
