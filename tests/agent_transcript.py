"""A programmer's agent at work, recorded-style: twenty turns with reasoning and tools, as
`agent_transcript.json` has them, played through a server."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

_FILE = Path(__file__).with_suffix(".json")


class Turn(NamedTuple):
    """What a turn cost: the tokens of its prompt, those of them found in the cache, and those of
    the reply."""

    prompt: int
    cached: int
    reply: int


def replies() -> list[str]:
    """What the model says in each turn, as it writes it."""
    return [_written(turn["reply"]) for turn in _recorded()["turns"]]


def play(
    ask: Callable[[int, dict[str, Any]], dict[str, Any]], limit: int | None = None
) -> list[Turn]:
    """Goes through all turns, or the first ``limit``. ``ask`` posts the body of turn number so
    much, makes the model answer with its reply, and returns the answer."""
    recorded = _recorded()
    messages: list[dict[str, Any]] = [{"role": "system", "content": recorded["system"]}]
    call_id, turns = None, []
    for number, turn in enumerate(recorded["turns"][:limit]):
        for message in turn["messages"]:
            called = {"tool_call_id": call_id} if message["role"] == "tool" else {}
            messages.append({**message, **called})
        answer = ask(number, {"messages": messages, "tools": recorded["tools"]})
        message = answer["choices"][0]["message"]
        expected = turn["reply"]
        assert message["reasoning"] == expected["reasoning"]
        assert (message["content"] or "") == expected["content"]
        if expected["call"] is not None:
            (call,) = message["tool_calls"]
            call_id = call["id"]
            assert call["function"]["name"] == expected["call"]["name"]
            assert json.loads(call["function"]["arguments"]) == expected["call"]["arguments"]
        messages.append(message)
        usage = answer["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        turns.append(Turn(usage["prompt_tokens"], cached, usage["completion_tokens"]))
    return turns


def assert_little_is_computed_again(turns: list[Turn], block_size: int) -> None:
    """At most 15 % over what was new, and a block a turn."""
    assert len(turns) > 5  # two questions or more
    computed = sum(turn.prompt - turn.cached for turn in turns)
    known = [0, *(turn.prompt + turn.reply for turn in turns[:-1])]
    new = sum(turn.prompt - before for turn, before in zip(turns, known, strict=True))
    assert computed <= 1.15 * new + block_size * len(turns), (computed, new)


def _recorded() -> dict[str, Any]:
    recorded: dict[str, Any] = json.loads(_FILE.read_text(encoding="utf-8"))
    return recorded


def _written(reply: dict[str, Any]) -> str:
    text = f"<think>\n{reply['reasoning']}\n</think>\n\n{reply['content']}"
    if reply["call"] is None:
        return text
    call = (
        f'<tool_call>\n{{"name": "{reply["call"]["name"]}", "arguments": '
        f"{json.dumps(reply['call']['arguments'], ensure_ascii=False)}}}\n</tool_call>"
    )
    return f"{text}\n{call}" if reply["content"] else text + call
