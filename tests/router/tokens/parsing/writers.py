"""Writes calls as the chat template of each model family does."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from router.tokens.parsing.calls import CallFormat, written_calls
from router.tokens.parsing.formats import CALL_FORMATS

Call = tuple[str, dict[str, Any]]
MARK = "]<]minimax[>["


def dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def braced(value: Any, quote: str) -> str:
    """Write a value of the Gemma family."""
    match value:
        case str():
            return quote + value + quote
        case dict():
            members = (f"{quote}{key}{quote}:{braced(each, quote)}" for key, each in value.items())
            return "{" + ",".join(members) + "}"
        case list():
            return "[" + ",".join(braced(each, quote) for each in value) + "]"
    return dumped(value)


def element(tag: str, value: Any) -> str:
    """Write an argument of MiniMax M3."""
    match value:
        case dict():
            inner = "".join(element(key, each) for key, each in value.items())
        case list():
            inner = "".join(element("item", each) for each in value)
        case str():
            inner = value
        case _:
            inner = dumped(value)
    return f"{MARK}<{tag}>{inner}{MARK}</{tag}>"


def gemma(start: str, quote: str, end: str) -> Callable[[Sequence[Call]], str]:
    def one(name: str, arguments: Mapping[str, Any]) -> str:
        members = (f"{key}:{braced(value, quote)}" for key, value in arguments.items())
        return f"{start}call:{name}{{{','.join(members)}}}{end}"

    return lambda calls: "".join(one(*call) for call in calls)


def pythonic(value_of: Callable[[Any], str]) -> Callable[[Sequence[Call]], str]:
    def one(name: str, arguments: Mapping[str, Any]) -> str:
        members = (f"{key}={value_of(value)}" for key, value in arguments.items())
        return f"{name}({', '.join(members)})"

    return lambda calls: (
        f"<|tool_call_start|>[{', '.join(one(*call) for call in calls)}]<|tool_call_end|>"
    )


def minimax(calls: Sequence[Call]) -> str:
    written = ""
    for name, arguments in calls:
        inner = "".join(element(*each) for each in arguments.items())
        written += f'{MARK}<invoke name="{name}">{inner}{MARK}</invoke>\n'
    return f"{MARK}<tool_call>\n{written}{MARK}</tool_call>"


def minicpm(value: Any) -> Any:
    """Write text in a CDATA section, where that is needed."""
    if any(each in str(value) for each in "<&\n"):
        return f"<![CDATA[{value if isinstance(value, str) else dumped(value)}]]>"
    return value


def templated(format: CallFormat) -> Callable[[Sequence[Call]], str]:
    own = minicpm if format.name == "minicpm5" else lambda value: value

    def write(calls: Sequence[Call]) -> str:
        functions = [
            {"name": name, "arguments": {key: own(value) for key, value in arguments.items()}}
            for name, arguments in calls
        ]
        if format.name == "harmony":
            messages = (written_calls(format, [each]) + "<|call|>" for each in functions)
            return "<|start|>assistant".join(messages)
        return written_calls(format, functions)

    return write


WRITERS = {name: templated(format) for name, format in CALL_FORMATS.items()} | {
    "gemma4": gemma("<|tool_call>", '<|"|>', "<tool_call|>"),
    "function_gemma": gemma("<start_function_call>", "<escape>", "<end_function_call>"),
    "pythonic": pythonic(repr),
    "minimax_m3": minimax,
}
"""By the name of the parser."""


def marks(parser: str) -> list[str]:
    """Return the texts that delimit calls and values in a format."""
    format = CALL_FORMATS[parser]
    template, tags = format.template, format.tags
    found = {*format.openers, format.end, *format.call_ends, *format.style.quotes}
    found |= {template.begin.replace("{name}", "f"), template.argument.replace("{key}", "s")}
    if tags is not None:
        found |= {tags.close.replace("{key}", "s"), tags.end}
    return sorted(filter(None, found))
