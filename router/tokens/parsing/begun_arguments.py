"""Calls that a model makes of its own accord and writes argument by argument, between tags: each
argument is passed on when it is whole, as the tool parser reads it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container, Mapping
from typing import Any, NamedTuple

from router.tokens.parsing.streaming_calls import CallFragment

_MAX_BEGINNING_CHARS = 2000
_NAME = r"(?P<name>[\w.:/@-]{1,256}?)"
_KEY = r"(?P<key>[^<>]{1,256}?)"


class _TaggedForm(NamedTuple):
    begin: re.Pattern[str]
    """What comes before the first argument."""
    argument: re.Pattern[str]
    argument_end: str
    end: str
    """What ends the call, before the marker that ends calls; nothing if that does it."""
    section_end: str
    """That marker."""


def _tagged(
    begin: str,
    argument: str,
    argument_end: str,
    end: str = "",
    section_end: str = "</tool_call>",
) -> _TaggedForm:
    found = re.compile(begin.replace("NAME", _NAME))
    key = re.compile(argument.replace("KEY", _KEY))
    return _TaggedForm(found, key, argument_end, end, section_end)


_GLM = _tagged(
    r"\s*+NAME\s*+(?=<arg_key>)",
    r"\s*+<arg_key>KEY</arg_key>(?:\\n|\s)*+<arg_value>",
    "</arg_value>",
)
_FORMS = {
    "qwen3_coder": _tagged(
        r"\s*+<function=NAME>\s*+(?=<parameter=)",
        r"\s*+<parameter=KEY>",
        "</parameter>",
        "</function>",
    ),
    "glm47": _GLM,
    "laguna": _GLM,
    "longcat": _tagged(
        r"\s*+NAME\s*+(?=<longcat_arg_key>)",
        r"\s*+<longcat_arg_key>KEY</longcat_arg_key>(?:\\n|\s)*+<longcat_arg_value>",
        "</longcat_arg_value>",
        section_end="</longcat_tool_call>",
    ),
}
"""By the name of the tool parser that reads such calls as a whole. Each section has one call."""


class TaggedCallParser:
    """Reads the call of one section of a reply, as `router.tokens.parsing.begun_calls` does."""

    is_parsed_later = True

    def __init__(
        self, form: _TaggedForm, parse: Callable[[str, Any], Any], tools: Any, names: Container[str]
    ) -> None:
        self._form = form
        self._parse = parse
        self._tools = tools
        self._names = names
        self._outside = ""  # text that is not within an argument
        self._given_up = False
        self._head = ""  # the beginning of the call, up to the first argument
        self._opening: re.Match[str] | None = None  # of the argument that is open
        self._value: list[str] = []
        self._tail = ""  # the end of the value, in which its end tag may begin
        self._shown = 0
        self.started = self.in_call = False

    @classmethod
    def of(
        cls, parser: str, parse: Callable[[str, Any], Any], tools: Any, names: Container[str]
    ) -> TaggedCallParser | None:
        return cls(_FORMS[parser], parse, tools, names) if parser in _FORMS else None

    @property
    def in_string(self) -> bool:
        """Whether what comes next is in an argument."""
        return self._opening is not None

    @property
    def other_text(self) -> str:
        return self._outside.strip().removeprefix(self._form.end).strip()

    def feed(self, text: str) -> list[CallFragment]:
        """Return the pieces of the call in ``text``."""
        fragments: list[CallFragment] = []
        while text and not self._given_up:
            if self._opening is not None:
                text = self._read_value(text, fragments)
                continue
            self._outside += text
            text = ""
            if not self.started:
                found = self._form.begin.match(self._outside)
                known = found is not None and found["name"] in self._names
                if found is None or not known:
                    self._given_up = found is not None or len(self._outside) > _MAX_BEGINNING_CHARS
                    break
                self._head, self._outside = found[0], self._outside[found.end() :]
            opening = self._form.argument.match(self._outside)
            if opening is None:
                if not self.started:
                    self._outside, self._head = self._head + self._outside, ""
                break
            if not self.started:
                found = self._form.begin.match(self._head + self._outside)
                assert found is not None
                fragments.append(CallFragment(found["name"], "{"))
                self.started = self.in_call = True
            self._opening, text = opening, self._outside[opening.end() :]
            self._outside = self._tail = ""
            self._value = []
        return fragments

    def finish(self) -> list[CallFragment]:
        """End the section, and return the rest of the call."""
        fragments: list[CallFragment] = []
        if self._opening is not None:
            # The last argument has no end tag.
            value = "".join(self._value).rstrip().removesuffix(self._form.section_end)
            self._add(value.rstrip().removesuffix(self._form.end), fragments)
        if self.in_call:
            self.in_call = False
            fragments.append(CallFragment(None, "}"))
        return fragments

    def _read_value(self, text: str, fragments: list[CallFragment]) -> str:
        """Add ``text`` to the open argument. Return what follows the argument."""
        end = self._form.argument_end
        joined = self._tail + text
        place = joined.find(end)
        self._value.append(text)
        if place < 0:
            self._tail = joined[-(len(end) - 1) :]
            return ""
        rest = joined[place + len(end) :]
        whole = "".join(self._value)
        self._add(whole[: len(whole) - len(rest) - len(end)], fragments)
        return rest

    def _add(self, value: str, fragments: list[CallFragment]) -> None:
        assert self._opening is not None
        opening, self._opening = self._opening, None
        written = f"{self._head}{opening[0]}{value}{self._form.argument_end}{self._form.end}"
        try:
            parsed = self._parse(written, self._tools)
            arguments: Mapping[str, Any] = dict(parsed["arguments"])
            text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)[1:-1]
            text.encode()
        except Exception:  # generated text: a value of another type than the schema says
            text = f"{json.dumps(opening['key'].strip())}: {json.dumps(value.strip())}"
        if text:
            fragments.append(CallFragment(None, (", " if self._shown else "") + text))
            self._shown += 1
