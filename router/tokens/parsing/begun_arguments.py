"""Streaming of unconstrained tool calls whose arguments are written one by one, between tags or
commas: each argument is emitted when it is complete, as the tool parser reads it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container
from typing import Any, NamedTuple

from router.tokens.parsing.begun_values import ListedValue, TaggedValue, ValueText
from router.tokens.parsing.calls import MAX_PARSE_WORK, parse_work
from router.tokens.parsing.streaming_calls import CallFragment

_MAX_BEGINNING_CHARS = 2000
_NAME = r"(?P<name>[\w.:/@-]{1,256}?)"
_KEY = r"(?P<key>[^<>]{1,256}?)"


class _ArgumentForm(NamedTuple):
    """The syntax of calls."""

    begin: re.Pattern[str]
    """Matches the text before the first argument."""
    empty: re.Pattern[str]
    """Matches a complete call without arguments that follows another call."""
    argument: re.Pattern[str]
    """Matches the text before the value of an argument."""
    value: Callable[[], ValueText]
    argument_end: str
    """Matches the end of a value, and consumes it."""
    end: re.Pattern[str]
    """Matches the end of a call."""
    end_text: str
    """The literal end of a call; empty if the marker after calls ends it."""
    section_end: str = ""
    """The marker after calls, if a value may still be open there."""
    around: tuple[str, str] = ("", "")
    """Text to put around a single call for the tool parser."""
    quotes: tuple[str, ...] = ()
    """The quote around a string, which never occurs inside it."""


def _tagged(
    head: str,
    first: str,
    argument: str,
    argument_end: str,
    end: str = "",
    section_end: str = "</tool_call>",
) -> _ArgumentForm:
    """Return the syntax with tags: ``head``, then arguments, the first of which begins with
    ``first``."""
    head = rf"\s*+(?P<head>{head.replace('NAME', _NAME)}\s*+)"
    ends = re.escape(end) if end else "(?!)"
    return _ArgumentForm(
        re.compile(f"{head}(?={first})"),
        re.compile(head + ends),
        re.compile(r"\s*+" + argument.replace("KEY", _KEY)),
        lambda: TaggedValue(argument_end),
        argument_end,
        re.compile(r"\s*+" + ends),
        end,
        section_end,
    )


def _listed(
    head: str, equals: str, close: str, quotes: tuple[str, ...], around: tuple[str, str]
) -> _ArgumentForm:
    """Return the syntax with commas: ``around`` the calls, each with ``head``, names and values
    separated by ``equals``, and ``close``."""
    head = rf"(?P<head>{head.replace('NAME', _NAME)}\s*+)"
    name, closing = rf"\w{{1,256}}+\s*+{equals}", r"(?:,\s*+)?" + re.escape(close)
    before = rf"\s*+(?:[,;{re.escape(around[0])}]\s*+)?"
    return _ArgumentForm(
        re.compile(rf"{before}{head}(?={name}\s*+[^\s,;)\]}}])"),
        re.compile(rf"{before}{head}{closing}"),
        re.compile(rf"\s*+(?:,\s*+)?(?P<key>\w{{1,256}}+)\s*+{equals}"),
        lambda: ListedValue(quotes, escapes=close == ")"),
        "",
        re.compile(rf"\s*+{closing}"),
        close,
        around=around,
        quotes=() if close == ")" else quotes,
    )


def _dsml(section_end: str) -> _ArgumentForm:
    return _tagged(
        '<｜DSML｜invoke name="NAME">',
        "<｜DSML｜parameter ",
        '<｜DSML｜parameter name="KEY" string="(?:true|false)">',
        "</｜DSML｜parameter>",
        "</｜DSML｜invoke>",
        section_end,
    )


_GLM = _tagged(
    "NAME",
    "<arg_key>",
    r"<arg_key>KEY</arg_key>(?:\\n|\s)*+<arg_value>",
    "</arg_value>",
)
_FORMS = {
    "qwen3_coder": _tagged(
        "<function=NAME>",
        "<parameter=",
        "<parameter=KEY>",
        "</parameter>",
        "</function>",
    ),
    "seed_oss": _tagged(
        "<function=NAME>",
        "<parameter=",
        "<parameter=KEY>",
        "</parameter>",
        "</function>",
        "</seed:tool_call>",
    ),
    "deepseek_v32": _dsml("</｜DSML｜function_calls>"),
    "deepseek_v4": _dsml("</｜DSML｜tool_calls>"),
    "glm47": _GLM,
    "laguna": _GLM,
    "longcat": _tagged(
        "NAME",
        "<longcat_arg_key>",
        r"<longcat_arg_key>KEY</longcat_arg_key>(?:\\n|\s)*+<longcat_arg_value>",
        "</longcat_arg_value>",
        section_end="</longcat_tool_call>",
    ),
    "minimax_m2": _tagged(
        '<invoke name="NAME">',
        "<parameter name=",
        '<parameter name="KEY">',
        "</parameter>",
        "</invoke>",
        "</minimax:tool_call>",
    ),
    "minicpm5": _tagged(
        r'"NAME"\s*+>',
        r"<param\s",
        r'<param\s++name\s*+=\s*+"KEY"\s*+>',
        "</param>",
        section_end="</function>",
    ),
    "muse_spark": _tagged(
        r'<atem:invoke\s[^>]{0,200}?\bname="NAME">',
        r"<atem:parameter\s",
        r'<atem:parameter\s[^>]{0,200}?\bname="KEY"[^>]{0,200}+>',
        "</atem:parameter>",
        "</atem:invoke>",
        "</atem:function_calls>",
    ),
    "gemma4": _listed(r"call:NAME\{", ":", "}", ('<|"|>',), ("", "")),
    "function_gemma": _listed(r"call:NAME\{", ":", "}", ("<escape>",), ("", "")),
    "pythonic": _listed(r"NAME\(", "=(?!=)", ")", ('"', "'"), ("[", "]")),
}
"""By the name of the tool parser that reads such calls when complete."""


class ArgumentParser:
    """Reads the calls of one section of an answer, like `router.tokens.parsing.begun_calls`."""

    is_parsed_later = True

    def __init__(
        self, parser: str, parse: Callable[[str, Any], Any], tools: Any, names: Container[str]
    ) -> None:
        self._form = _FORMS[parser]
        self._parser, self._parse, self._tools = parser, parse, tools
        self._names = names
        self._outside = ""  # text outside a value
        self._given_up = False  # no further call begins in the section
        self._rest: list[str] = []  # the text that follows
        self._head = ""  # the start of the call, up to the first argument
        self._opening: re.Match[str] | None = None  # of the open argument
        self._value = self._form.value()
        self._shown = 0  # arguments of the call
        self.started = self.in_call = False

    @classmethod
    def of(
        cls, parser: str, parse: Callable[[str, Any], Any], tools: Any, names: Container[str]
    ) -> ArgumentParser | None:
        return cls(parser, parse, tools, names) if parser in _FORMS else None

    @property
    def in_string(self) -> bool:
        """Whether the next text is inside an argument."""
        return self._opening is not None

    @property
    def other_text(self) -> str:
        """The text after the last call, which belongs to no call."""
        text = "".join([self._outside, *self._rest])
        return text.strip().removeprefix(self._form.around[1]).strip()

    def feed(self, text: str) -> list[CallFragment]:
        """Return the parts of calls in ``text``."""
        fragments: list[CallFragment] = []
        if self._given_up:
            if self.started:
                self._rest.append(text)
            return fragments
        while True:
            if self._opening is not None:
                ended = self._value.feed(text)
                if ended is None:
                    return fragments
                value, text = ended
                self._add(value, fragments)
            self._outside += text
            if self.in_call:  # a long run would be copied for each token
                self._outside = self._outside.lstrip()
            while self._end_call(fragments) or self._begin_call(fragments):
                pass
            if self._opening is None:
                return fragments
            text, self._outside = self._outside, ""

    def finish(self) -> list[CallFragment]:
        """End the section, and return the rest of the call."""
        fragments: list[CallFragment] = []
        if self._opening is not None:
            # The last argument has no end of its own.
            value = self._value.so_far().rstrip().removesuffix(self._form.section_end)
            self._add(value.rstrip().removesuffix(self._form.end_text), fragments)
        if self.in_call:
            self.in_call = False
            fragments.append(CallFragment(None, "}"))
        return fragments

    def _begin_call(self, fragments: list[CallFragment]) -> bool:
        """Begin a call, or the next argument of one. Return whether more text may be read outside a
        value."""
        if self._opening is not None or self._given_up:
            return False
        begun = None
        if not self.in_call:
            empty = self._form.empty.match(self._outside) if self.started else None
            begun = empty or self._form.begin.match(self._outside)
            if begun is None or begun["name"] not in self._names:
                self._given_up = begun is not None or len(self._outside) > _MAX_BEGINNING_CHARS
                return False
            if empty is not None:
                fragments.append(CallFragment(empty["name"], "{}"))
                self._outside = self._outside[empty.end() :]
                return True
        opening = self._form.argument.match(self._outside, begun.end() if begun else 0)
        if opening is None:
            return False
        if begun is not None:
            fragments.append(CallFragment(begun["name"], "{"))
            self._head, self._shown = begun["head"], 0
            self.started = self.in_call = True
        self._outside = self._outside[opening.end() :]
        self._opening, self._value = opening, self._form.value()
        return False

    def _end_call(self, fragments: list[CallFragment]) -> bool:
        """Return whether a call ended."""
        end = self._form.end.match(self._outside) if self.in_call else None
        if end is None or self._opening is not None:
            return False
        self._outside = self._outside[end.end() :]
        self.in_call = False
        fragments.append(CallFragment(None, "}"))
        return True

    def _add(self, value: str, fragments: list[CallFragment]) -> None:
        assert self._opening is not None
        opening, self._opening = self._opening, None
        form, key = self._form, opening["key"].strip()
        argument = opening[0].lstrip(" \n,") + value + form.argument_end
        written = f"{form.around[0]}{self._head}{argument}{form.end_text}{form.around[1]}"
        try:
            if parse_work(written, self._parser) > MAX_PARSE_WORK:
                raise ValueError("too long")
            ((_, read),) = dict(self._parse(written, self._tools)["arguments"]).items()
            text = _member(key, read)
            text.encode()
        except Exception:  # generated text: a value may have another type than in the schema
            value = value.strip()
            for quote in form.quotes:
                value = value.removeprefix(quote).removesuffix(quote)
            text = _member(key, value)
        fragments.append(CallFragment(None, (", " if self._shown else "") + text))
        self._shown += 1


def _member(key: str, value: Any) -> str:
    return json.dumps({key: value}, ensure_ascii=False, allow_nan=False)[1:-1]
