"""Streaming of unconstrained tool calls: they are emitted as soon as they can be nothing else, when
a tool of the request is named after the marker of calls and its arguments have begun."""

from __future__ import annotations

import re
from collections.abc import Container
from typing import NamedTuple

from router.tokens.detokenizer import partial_match_length
from router.tokens.parsing.json_reader import JsonReader
from router.tokens.parsing.streaming_calls import CallFragment

_MAX_BEGINNING_CHARS = 2000
_NAME = r"(?P<name>[\w.:/@-]{1,256}?)"


class _Form(NamedTuple):
    """The text before a call's arguments, which are a JSON object, and the text between calls."""

    begin: re.Pattern[str]
    between: re.Pattern[str]
    end: str
    """What ends a call even if its arguments lack a bracket; empty: nothing does."""


def _form(begin: str, between: str, end: str = "") -> _Form:
    begin = begin.replace("NAME", _NAME) + r"\s*+(?=\{)"
    return _Form(re.compile(begin), re.compile(between), end)


_OBJECTS = _form(
    r'\s*+(?:\[\s*+)?\{\s*+"name"\s*+:\s*+"NAME"\s*+,\s*+"(?:arguments|parameters)"\s*+:',
    r'(?:\s*+,\s*+"[^"]*+"\s*+:\s*+"[^"]*+")*+[\s}\],;]*+',  # such as its id
)
_FORMS = {
    "json": _form(
        r"\s*+(?:```(?:json|tool_call|tool_code)?\s*+)?(?:<\|python_(?:tag|start|end)\|>\s*+)*+"
        r"(?:\[\s*+)?\{\s*+"
        r'(?:"type"\s*+:\s*+"function"\s*+,\s*+)?(?:"function"\s*+:\s*+\{\s*+)?'
        r'"name"\s*+:\s*+"NAME"\s*+,\s*+"(?:arguments|parameters)"\s*+:',
        r'(?:\s*+,\s*+"[^"]*+"\s*+:\s*+"[^"]*+")*+[\s}\],;`]*+(?:<\|python_end\|>)?\s*+',
    ),
    "json_tools": _OBJECTS,
    "granite": _OBJECTS,
    "jamba": _OBJECTS,
    "nemotron": _OBJECTS,
    "phi4_mini": _OBJECTS,
    "deepseek_v3": _form(
        r"\s*+(?:<｜tool▁call▁begin｜>)?\s*+function<｜tool▁sep｜>NAME\s*+```(?:json)?",
        r"\s*+(?:```)?\s*+(?:<｜tool▁call▁end｜>)?\s*+",
        end="```",
    ),
    "deepseek_v31": _form(
        r"\s*+(?:<｜tool▁call▁begin｜>)?\s*+NAME\s*+<｜tool▁sep｜>",
        r"\s*+(?:<｜tool▁call▁end｜>)?\s*+",
        end="<｜tool▁call▁end｜>",
    ),
    "harmony": _form(
        r"(?s:.{0,200}?)(?:\A|\s)to=(?:functions\.)?NAME(?=[\s<])(?s:.{0,200}?)<\|message\|>",
        r"\s*+",
    ),
    "mistral": _form(
        r"\s*+NAME\s*+(?:\[CALL_ID\]\s*+(?P<id>[\w-]{1,64}+)\s*+)?\[ARGS\]",
        r"\s*+(?:\[TOOL_CALLS\])?",
    ),
    "kimi_k2": _form(
        r"\s*+(?:<\|tool_call_begin\|>)?\s*+(?P<id>(?:functions\.)?NAME:\d+)\s*+"
        r"<\|tool_call_argument_begin\|>",
        r"\s*+(?:<\|tool_call_end\|>)?\s*+",
        end="<|tool_call_end|>",
    ),
    "kimi_k3": _form(
        r'\s*+<\|open\|>call tool="NAME" index="\d+"<\|sep\|>\s*+<\|open\|>json[^<]*<\|sep\|>',
        r"\s*+(?:<\|close\|>json<\|sep\|>)?\s*+(?:<\|close\|>call<\|sep\|>)?\s*+",
    ),
}
"""By the name of the tool parser that reads such calls when complete."""


class BegunCallParser:
    """Reads the calls of ``names`` in one section of an answer, between the markers of calls.

    Until a call has begun, the section may still be something else. Common errors in arguments are
    repaired (`JsonReader`); arguments that are not JSON are passed through unchanged.
    """

    is_parsed_later = False

    def __init__(self, form: _Form, names: Container[str]) -> None:
        self._form = form
        self._names = names
        self._outside = ""  # text since the last call
        self._given_up = False  # no further call begins in the section
        self._rest: list[str] = []  # the text that follows
        self._reader = JsonReader()
        self._held = ""  # the end of the arguments, where the end of the call may begin
        self.started = self.in_call = False

    @classmethod
    def of(cls, parser: str, names: Container[str]) -> BegunCallParser | None:
        """Return a streaming parser for calls in the syntax of the tool parser ``parser``; None if
        they can only be parsed when complete."""
        return cls(_FORMS[parser], names) if parser in _FORMS else None

    @property
    def in_string(self) -> bool:
        """Whether the next text is in a string of the arguments."""
        return self.in_call and self._reader.in_string

    @property
    def other_text(self) -> str:
        """The text after the last call, which belongs to no call."""
        between = self._form.between.match(self._outside)
        own = self._outside[between.end() if between else 0 :]
        return "".join([own, *self._rest]).strip()

    def feed(self, text: str) -> list[CallFragment]:
        """Return the parts of calls in ``text``."""
        fragments: list[CallFragment] = []
        while text:
            if self.in_call:
                text = self._read(text, fragments)
                continue
            if self._given_up:
                if self.started:
                    self._rest.append(text)
                break
            self._outside += text
            begun = self._begun()
            if begun is None:
                break
            fragments.append(CallFragment(begun["name"], "", begun.groupdict().get("id")))
            text, self._outside = self._outside[begun.end() :], ""
            self._reader = JsonReader()
            self.started = self.in_call = True
        return fragments

    def finish(self) -> list[CallFragment]:
        """End the section, and return the rest of the last call."""
        fragments: list[CallFragment] = []
        if self.in_call:
            self._end(fragments)
        return fragments

    def _read(self, text: str, fragments: list[CallFragment]) -> str:
        """Read arguments, and return the text after the call."""
        end, rest = self._form.end, ""
        if end:
            text, found, rest = (self._held + text).partition(end)
            rest = found + rest
            certain = len(text) - (0 if found else partial_match_length(text, [end]))
            text, self._held = text[:certain], text[certain:]
        arguments, after = self._reader.feed(text)
        self._add(fragments, arguments)
        if self._reader.complete:
            after += self._held + rest
            self.in_call, self._held = False, ""
            return after
        if rest and self._reader.in_string:
            self._add(fragments, self._reader.feed(end)[0])
            return rest[len(end) :]
        if rest:
            self._end(fragments)
        return rest

    def _end(self, fragments: list[CallFragment]) -> None:
        """End a call whose arguments are not complete."""
        held, self._held = self._held, ""
        if self._reader.in_string:
            self._add(fragments, self._reader.feed(held)[0])
        self._add(fragments, self._reader.finish())
        self.in_call = False

    def _begun(self) -> re.Match[str] | None:
        """Return the start of the next call, once it is known to be one."""
        between = self._form.between.match(self._outside) if self.started else None
        found = self._form.begin.match(self._outside, between.end() if between else 0)
        self._given_up = len(self._outside) > _MAX_BEGINNING_CHARS or (
            found is not None and found["name"] not in self._names
        )
        return None if self._given_up else found

    def _add(self, fragments: list[CallFragment], arguments: str) -> None:
        if not arguments:
            return
        if fragments:
            arguments = fragments[-1].arguments + arguments
            fragments[-1] = fragments[-1]._replace(arguments=arguments)
        else:
            fragments.append(CallFragment(None, arguments))
