"""Tool call syntaxes for which mlx-lm has no parser, or a slow one, and their detection.

Formats: the chat templates of the models, and
https://github.com/vllm-project/vllm/tree/main/tests/tool_parsers"""

from __future__ import annotations

import ast
import importlib
import json
import math
import re
from collections.abc import Callable, Container
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, NamedTuple

from router.schemas.value_schema import ValueSchema
from router.tokens.parsing.calls import JSON, ToolSyntax

_HEADER = re.compile(
    r"(?<![\w-])(?P<name>[\w-]{1,256}+)\s{0,64}+"
    r"(?:\[CALL_ID\]\s{0,64}+(?P<id>[\w-]{0,64}+)\s{0,64}+)?\[ARGS\]\s*+"
)
"""Before the arguments of a Mistral call. Bounded, because mlx-lm's expression takes quadratic
time."""
_FENCE = re.compile(r"```(?:json)?")


def syntax_named(name: str) -> ToolSyntax:
    """Return the syntax of the tool parser ``name``, ours or mlx-lm's. Raises `ImportError`."""
    return OWN_SYNTAXES[name] if name in OWN_SYNTAXES else _mlx_lm_syntax(name)


def detected_syntax(tokenizer: Any) -> str:
    """Return the name of the tool parser of ``tokenizer``, mlx-lm's wrapper; empty if unknown."""
    source, vocabulary = template_source(tokenizer), tokenizer.get_vocab()
    if _MINIMAX in source:  # mlx-lm mistakes it for JSON between the same tags
        return "minimax_m3"
    if tokenizer.tool_parser is not None:
        return str(tokenizer.init_kwargs.get("tool_parser_type", ""))
    if not isinstance(tokenizer.chat_template, str):  # mlx-lm only looks at single templates
        from mlx_lm.tokenizer_utils import _infer_tool_parser

        either = SimpleNamespace(chat_template=source, get_vocab=lambda: vocabulary)
        if found := _infer_tool_parser(either):
            return str(found)
    return next((name for name, known in _SIGNS if known(source, vocabulary)), "")


def template_source(tokenizer: Any) -> str:
    """Return the text of the chat template; if there are several, of the one used with tools."""
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("tool_use", template.get("default"))
    return template if isinstance(template, str) else ""


def _mlx_lm_syntax(name: str) -> ToolSyntax:
    module = importlib.import_module(f"mlx_lm.tool_parsers.{name}")
    parse: Callable[[str, Any], Any] = module.parse_tool_call
    return ToolSyntax(name, module.tool_call_start, module.tool_call_end, parse)


# -- Mistral ---------------------------------------------------------------------


def _mistral_calls(text: str, tools: Any) -> list[dict[str, Any]]:
    """Read a JSON list of calls, or calls of a name, an optional id, and arguments."""
    if text.lstrip().startswith("["):
        with suppress(ValueError):
            return list(JSON.parse(text, tools))
    calls: list[dict[str, Any]] = []
    decoder, position = json.JSONDecoder(), 0
    while (header := _HEADER.search(text, position)) is not None:
        arguments, position = decoder.raw_decode(text, header.end())
        calls.append({"name": header["name"], "arguments": arguments, "id": header["id"]})
    return calls


# -- DeepSeek --------------------------------------------------------------------

_CALL, _CALL_END, _SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_INVOKE, _PARAMETER = '<｜DSML｜invoke name="', '<｜DSML｜parameter name="'


def _deepseek_calls(text: str, tools: Any) -> list[dict[str, Any]]:
    """Read the calls of V3 and R1 (the kind, a name, and arguments in a fence) and of V3.1 (a name,
    and arguments)."""
    calls = []
    for piece in text.split(_CALL)[1:]:
        name, found, arguments = piece.partition(_CALL_END)[0].partition(_SEPARATOR)
        if not found:
            raise ValueError("no separator")
        if (fence := _FENCE.search(arguments)) is not None and name.strip() == "function":
            name, arguments = arguments[: fence.start()], arguments[fence.end() :]
            arguments = arguments.strip().removesuffix("```")
        calls.append({"name": name.strip(), "arguments": arguments.strip()})
    return calls


def _dsml_calls(text: str, tools: Any) -> Any:
    """Read the calls of V3.2 and V4: elements whose names start with a special token."""
    calls = []
    for invoke in text.split(_INVOKE)[1:]:
        name, found, body = invoke.partition('">')
        if not found:
            raise ValueError("no name")
        arguments = {}
        for parameter in body.partition("</｜DSML｜invoke>")[0].split(_PARAMETER)[1:]:
            key, _, rest = parameter.partition('"')
            kind, found, value = rest.partition(">")
            if not found:
                raise ValueError("no value")
            value = value.partition("</｜DSML｜parameter>")[0]
            arguments[key] = value if 'string="true"' in kind else _decoded(value)
        calls.append({"name": name, "arguments": arguments})
    return calls[0] if len(calls) == 1 else calls


def _decoded(value: str) -> Any:
    try:
        return json.loads(value, parse_constant=_finite, parse_float=_finite)
    except (ValueError, RecursionError):
        return value


def _finite(text: str) -> float:
    """Return a number. Raises `ValueError` for numbers that JSON does not support."""
    if not math.isfinite(number := float(text)):
        raise ValueError("not finite")
    return number


# -- MiniMax M3 ------------------------------------------------------------------

_MINIMAX = "]<]minimax[>["
"""Precedes each tag. Other text that looks like tags is text."""
_TAG = re.compile(r'<(?P<end>/?)(?P<tag>[^<>\s]+)(?:\s+name="(?P<name>[^"]*)")?>')


class _Element(NamedTuple):
    tag: str
    name: str | None
    text: str
    children: list[_Element]


def _minimax_calls(text: str, tools: Any) -> Any:
    """Read calls whose arguments are nested elements, with types from the schema."""
    schemas = _schemas(tools)
    calls: list[dict[str, Any]] = []
    opened: list[_Element] = []
    for piece in text.split(_MINIMAX)[1:]:
        tag = _TAG.match(piece)
        if tag is None:
            raise ValueError("no tag")
        if not tag["end"]:
            element = _Element(tag["tag"], tag["name"], piece[tag.end() :], [])
            if opened:
                opened[-1].children.append(element)
            opened.append(element)
            continue
        element = opened.pop()
        if element.tag != tag["tag"]:
            raise ValueError("a tag that was not opened")
        if not opened:
            arguments = _members(element, ValueSchema(schemas.get(element.name)))
            calls.append({"name": element.name, "arguments": arguments})
    if opened:
        raise ValueError("a tag that does not end")
    return calls[0] if len(calls) == 1 else calls


def _members(element: _Element, schema: ValueSchema) -> dict[str, Any]:
    members: dict[str, list[Any]] = {}
    for child in element.children:
        value = _element_value(child, schema.member(child.tag))
        members.setdefault(child.tag, []).append(value)
    return {tag: values[0] if len(values) == 1 else values for tag, values in members.items()}


def _element_value(element: _Element, schema: ValueSchema) -> Any:
    types = schema.types
    if element.children:
        may_be_list = "array" in types or "object" not in types
        if may_be_list and all(child.tag == "item" for child in element.children):
            return [_element_value(child, schema.items) for child in element.children]
        return _members(element, schema)
    if "string" not in types and not element.text.strip():
        if "array" in types:
            return []
        if "object" in types:
            return {}
    value = _decoded(element.text)
    return value if "string" not in types or schema.names_type_of(value) else element.text


# -- arguments between tags ------------------------------------------------------


class _Tags(NamedTuple):
    """The syntax of calls with each argument between tags of its own, as text without quotes."""

    next: re.Pattern[str]
    """Finds where a call begins, with its ``name``, or an argument, with its ``key``."""
    end: str  # after the value of an argument
    call_end: str = ""
    """What ends a call, if it is not the marker after calls."""
    text_of: Callable[[str], str] = str
    """Returns the text of a value, given what stands between the tags."""
    other: str = ""
    """The parser of mlx-lm that reads calls without such tags."""
    guesses: bool = False
    """Whether a value without a type in the schema is JSON if it can be. Otherwise only objects and
    lists are."""

    def parse(self, text: str, tools: Any) -> Any:
        """Read calls as their templates write them: text with the whitespace around it, and other
        values with types from the schema. mlx-lm's parsers strip text, and take some for JSON."""
        schemas, schema = _schemas(tools), ValueSchema(None)
        calls: list[dict[str, Any]] = []
        position = 0
        while (found := self.next.search(text, position)) is not None:
            position = found.end()
            if found["name"] is not None:
                calls.append({"name": found["name"].strip(), "arguments": {}})
                schema = ValueSchema(schemas.get(calls[-1]["name"]))
                continue
            end = text.find(self.end, position)
            if not calls or end < 0:
                raise ValueError("an argument without a call or an end")
            key, value = found["key"].strip(), self.text_of(text[position:end])
            calls[-1]["arguments"][key] = self._value(value, schema.member(key))
            position = end + len(self.end)
        if self.call_end not in text:
            raise ValueError("a call without an end")
        if not calls and self.other:
            return _mlx_lm_syntax(self.other).parse(text, tools)
        return calls[0] if len(calls) == 1 else calls

    def _value(self, text: str, schema: ValueSchema) -> Any:
        types, value = schema.types, _decoded(text)
        if text == "None" and "null" in types:  # so some templates write null
            return None
        if "string" in types:
            return value if schema.names_type_of(value) else text
        if not types and not self.guesses:
            return value if isinstance(value, dict | list) else text
        if isinstance(value, str):
            value = _python_value(text)
        if isinstance(value, float) and value.is_integer() and not schema.names_type_of(value):
            return int(value)
        return value


def _python_value(text: str) -> Any:
    """Return the value that ``text`` has in Python, such as True; the text if it has none."""
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text.strip()


def _without_line_breaks(text: str) -> str:
    return text.removeprefix("\n").removesuffix("\n")


def _without_cdata(text: str) -> str:
    stripped = text.strip()
    if stripped.startswith("<![CDATA[") and stripped.endswith("]]>"):
        return stripped.removeprefix("<![CDATA[").removesuffix("]]>")
    return text


def _without_quotes(text: str) -> str:
    value = _decoded(text) if text.lstrip().startswith('"') else text
    return value if isinstance(value, str) else text


def _tags(call: str, argument: str, end: str, call_end: str = "", **options: Any) -> _Tags:
    call = call.replace("NAME", r"(?P<name>[^<>\"']{1,256}?)")
    argument = argument.replace("KEY", r"(?P<key>[^<>\"']{1,256}?)")
    return _Tags(re.compile(f"{call}|{argument}"), end, call_end, **options)


def _glm(prefix: str, other: str) -> _Tags:
    return _tags(
        rf"\ANAME(?=<{prefix}arg_key>)",
        rf"<{prefix}arg_key>KEY</{prefix}arg_key>(?:\\n|\s)*+<{prefix}arg_value>",
        f"</{prefix}arg_value>",
        other=other,
        guesses=True,
    )


_FUNCTION = r"<function=NAME>", r"<parameter=KEY>", "</parameter>", "</function>"
_TAGGED = {
    "glm47": ("<tool_call>", "</tool_call>", _glm("", "glm47")),
    "laguna": ("<tool_call>", "</tool_call>", _glm("", "laguna")),
    "longcat": ("<longcat_tool_call>", "</longcat_tool_call>", _glm("longcat_", "longcat")),
    "minimax_m2": (
        "<minimax:tool_call>",
        "</minimax:tool_call>",
        _tags(
            r"<invoke name=[\"']?NAME[\"']?>",
            r"<parameter name=[\"']?KEY[\"']?>",
            "</parameter>",
            "</invoke>",
        ),
    ),
    "minicpm5": (
        "<function name=",
        "</function>",
        _tags(
            r"(?:\A\s*+|<function\s++name\s*+=\s*+)[\"']?NAME[\"']?\s*+>",
            r"<param\s++name\s*+=\s*+[\"']?KEY[\"']?\s*+>",
            "</param>",
            text_of=_without_cdata,
        ),
    ),
    "muse_spark": (
        "<atem:function_calls>",
        "</atem:function_calls>",
        _tags(
            r'<atem:invoke\b[^>]{0,200}?\bname="NAME">',
            r'<atem:parameter\b[^>]{0,200}?\bname="KEY"[^>]{0,200}+>',
            "</atem:parameter>",
            "</atem:invoke>",
            text_of=_without_quotes,
            guesses=True,
        ),
    ),
    "qwen3_coder": (
        "<tool_call>",
        "</tool_call>",
        _tags(*_FUNCTION, text_of=_without_line_breaks),
    ),
    "seed_oss": ("<seed:tool_call>", "</seed:tool_call>", _tags(*_FUNCTION)),
}


def _schemas(tools: Any) -> dict[Any, Any]:
    """Return the schemas of arguments by the names of functions."""
    return {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools or ()}


def _listed(name: str, start: str, end: str) -> ToolSyntax:
    """Return the syntax of a list of JSON objects between markers."""
    return ToolSyntax(name, start, end, JSON.parse)


_DEEPSEEK_MARKERS = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
OWN_SYNTAXES = {
    syntax.name: syntax
    for syntax in (
        ToolSyntax("deepseek_v3", *_DEEPSEEK_MARKERS, _deepseek_calls),
        ToolSyntax("deepseek_v31", *_DEEPSEEK_MARKERS, _deepseek_calls),
        ToolSyntax(
            "deepseek_v32", "<｜DSML｜function_calls>", "</｜DSML｜function_calls>", _dsml_calls
        ),
        ToolSyntax("deepseek_v4", "<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>", _dsml_calls),
        ToolSyntax("mistral", "[TOOL_CALLS]", "", _mistral_calls),
        _listed("granite", "<|tool_call|>", ""),
        ToolSyntax(
            "minimax_m3", f"{_MINIMAX}<tool_call>", f"{_MINIMAX}</tool_call>", _minimax_calls
        ),
        _listed("jamba", "<tool_calls>", "</tool_calls>"),
        _listed("nemotron", "<TOOLCALL>", "</TOOLCALL>"),
        _listed("phi4_mini", "<|tool_call|>", "<|/tool_call|>"),
        *(ToolSyntax(name, start, end, tags.parse) for name, (start, end, tags) in _TAGGED.items()),
    )
}
"""By the value of `--tool-parser`."""

_Known = Callable[[str, Container[str]], bool]
_SIGNS: tuple[tuple[str, _Known], ...] = (
    ("deepseek_v4", lambda source, _: "DSML｜" in source and "function_calls" not in source),
    ("deepseek_v32", lambda source, vocabulary: "DSML｜" in source or "｜DSML｜" in vocabulary),
    ("deepseek_v3", lambda source, _: _DEEPSEEK_MARKERS[0] in source and "```json" in source),
    ("deepseek_v31", lambda source, _: _DEEPSEEK_MARKERS[0] in source),
    ("seed_oss", lambda source, _: "<seed:tool_call>" in source),
    ("nemotron", lambda source, _: "<TOOLCALL>" in source),
    ("jamba", lambda source, _: "<tool_calls>" in source),
    # Templates that only describe calls to the model, such as SmolLM3's.
    ("json_tools", lambda source, _: "<tool_call>" in source),
    ("phi4_mini", lambda _, vocabulary: "<|/tool_call|>" in vocabulary),
    ("granite", lambda source, _: "<|tool_call|>" in source),
)
"""Formats unknown to mlx-lm, by a sign in the template's text or in the vocabulary."""
