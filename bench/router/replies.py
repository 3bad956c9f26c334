"""Reading of replies: the time for a call with a long argument, and for many calls, in each format.

The baseline is the JSON format. Text arrives in pieces of four characters, as tokens are."""

from __future__ import annotations

import statistics
import time
from typing import Any

from router.tokens.parsing.calls import written_calls
from router.tokens.parsing.formats import CALL_FORMATS, HARMONY, REASONING, ReplyFormat
from router.tokens.parsing.marked import MarkedReplyParser

CODE = "def f(a):\n    return a < 1 and '</x>'\n"
PROPERTIES = {"s": {"type": "string"}, "i": {"type": "integer"}}
TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": PROPERTIES}},
}
CHARS = 100_000
PIECE = 4


def replies(model: str, runs: int) -> None:
    """Print the times of all formats. ``model`` is not used."""
    text = CODE * (CHARS // len(CODE))
    print("| format | a call of 100 kB, ms | / JSON | 400 kB / 4 | 1,000 calls, ms | / JSON |")
    print("|---|---|---|---|---|---|")
    baseline: list[float] = []
    for name in ("json_tools", *(each for each in CALL_FORMATS if each != "json_tools")):
        long, longer = (written(name, [{"s": each}]) for each in (text, text * 4))
        many = written(name, [{"i": number} for number in range(1000)])
        times = [[seconds(name, each) for each in (long, longer, many)] for _ in range(runs)]
        one, four, calls = (statistics.median(each) * 1000 for each in zip(*times, strict=True))
        baseline = baseline or [one, calls]
        print(f"| {name} | {one:.0f} | {one / baseline[0]:.2f} | {four / 4 / one:.2f} "
              f"| {calls:.0f} | {calls / baseline[1]:.2f} |", flush=True)  # fmt: skip


def seconds(name: str, text: str) -> float:
    """Return the CPU time that reading ``text`` takes."""
    format = HARMONY if name == "harmony" else ReplyFormat(REASONING["think"], CALL_FORMATS[name])
    parser = MarkedReplyParser(format, format.initial_state, [TOOL], only_calls=True)
    pieces = [text[start : start + PIECE] for start in range(0, len(text), PIECE)]
    began = time.process_time()
    for piece in pieces:
        parser.feed(piece)
    parser.finish()
    taken = time.process_time() - began
    assert parser.called, name
    return taken


def written(name: str, calls: list[dict[str, Any]]) -> str:
    """Return ``calls`` of the tool as the model writes them."""
    functions = [{"name": "f", "arguments": each} for each in calls]
    if name != "harmony":
        return written_calls(CALL_FORMATS[name], functions)
    each = (written_calls(CALL_FORMATS[name], [function]) for function in functions)
    return "<|call|><|start|>assistant".join(each) + "<|call|>"
