"""The table of formats of tool calls, and their detection.

Formats: the chat templates of the models, and
https://github.com/vllm-project/vllm/tree/main/tests/tool_parsers"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from types import SimpleNamespace
from typing import Any

import regex

from router.tokens.parsing.calls import PLAIN_TEMPLATE, CallFormat, CallTemplate
from router.tokens.parsing.json_reader import PYTHON_CALLS, Style
from router.tokens.parsing.tagged import KEY, Tags


def syntax_named(name: str) -> CallFormat:
    """Return the format of the tool parser ``name``. Raises `ImportError`."""
    if name not in FORMATS:
        raise ImportError(f"no tool parser {name!r}")
    return FORMATS[name]


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


# -- the table -------------------------------------------------------------------

_MINIMAX = "]<]minimax[>["
"""Precedes each tag. Other text that looks like tags is text."""
_LIST = PLAIN_TEMPLATE._replace(between=", ")
_DEEPSEEK_START, _DEEPSEEK_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_DEEPSEEK_CALL, _DEEPSEEK_CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"


def _listed(name: str, start: str, end: str = "") -> CallFormat:
    """Return the format of a list of JSON objects between markers."""
    return CallFormat(name, start, end, _LIST._replace(before=f"{start}[", after=f"]{end}"))


def _functions(name: str, tag: str, line_break: str = "") -> CallFormat:
    """Return the format with a ``<function=...>`` in each element ``tag``."""
    return CallFormat(
        name,
        f"<{tag}>",
        f"</{tag}>",
        CallTemplate(
            f"<{tag}>\n<function={{name}}>\n",
            f"</function>\n</{tag}>",
            "\n",
            argument=f"<parameter={{key}}>{line_break}",
            argument_end=f"{line_break}</parameter>\n",
        ),
        heads=(r"<function=[\"']?NAME[\"']?>(?=\s*+<)",),
        opener="<function=",
        tags=Tags(
            rf"<parameter=[\"']?{KEY}[\"']?>",
            "</parameter>",
            "</function>",
            breaks=bool(line_break),
        ),
    )


def _pairs(name: str, prefix: str = "", line_break: str = "\n") -> CallFormat:
    """Return the format with a tag for each key and each value."""
    tag, key, value = f"{prefix}tool_call", f"{prefix}arg_key", f"{prefix}arg_value"
    return CallFormat(
        name,
        f"<{tag}>",
        f"</{tag}>",
        CallTemplate(
            f"<{tag}>{{name}}{line_break}",
            f"</{tag}>",
            "\n",
            argument=f"<{key}>{{key}}</{key}>{line_break}<{value}>",
            argument_end=f"</{value}>{line_break}",
        ),
        heads=(rf"NAME(?=\s*+<(?:{key}>|/{tag}))", r"NAME\s*+(?=\{)"),
        tags=Tags(rf"<{key}>{KEY}</{key}>(?:\\n|\s)*+<{value}>", f"</{value}>", guesses=True),
    )


def _invokes(
    name: str, start: str, end: str, template: CallTemplate, head: str, tags: Tags, opener: str
) -> CallFormat:
    """Return the format with an element for each call, within one for all."""
    template = template._replace(before=f"{start}\n", after=end)
    return CallFormat(name, start, end, template, (head,), opener, tags=tags)


def _dsml(name: str, block: str) -> CallFormat:
    """Return the format with DeepSeek's markup, in an element named ``block``."""
    call = '<｜DSML｜invoke name="{name}">\n', "</｜DSML｜invoke>\n"
    parameter = '<｜DSML｜parameter name="{key}" string="{is_text}">', "</｜DSML｜parameter>\n"
    return _invokes(
        name,
        f"<｜DSML｜{block}>",
        f"</｜DSML｜{block}>",
        CallTemplate(*call, argument=parameter[0], argument_end=parameter[1]),
        r'<｜DSML｜invoke name="NAME">(?=\s*+<)',
        Tags(
            rf'<｜DSML｜parameter name="{KEY}" string="(?P<kind>true|false)">',
            "</｜DSML｜parameter>",
            "</｜DSML｜invoke>",
        ),
        "<｜DSML｜invoke ",
    )


def _braces(name: str, start: str, end: str, quote: str) -> CallFormat:
    """Return the Gemma family's format, with text between ``quote``."""
    template = CallTemplate(f"{start}call:{{name}}{{", f"}}{end}", argument="{key}:", separator=",")
    # The braces and the start of a value are what prose lacks.
    value = r"[^{}]{1,256}?:\s*+[^\s,;)\]}]"
    head = rf"call:NAME\s*+(?=\{{\s*+(?:\}}|{regex.escape(quote)}|{value}))"
    style = Style((quote, '"'), bare=True)
    return CallFormat(name, start, end, template, (head,), style=style)


_ATTRIBUTES = r'(?:(?!name=)[\w:-]{1,32}="[^"<>]{0,200}"\s*+){0,8}+'

FORMATS: Mapping[str, CallFormat] = {
    each.name: each
    for each in (
        CallFormat(
            "json_tools",
            "<tool_call>",
            "</tool_call>",
            CallTemplate('<tool_call>\n{"name": "{name}", "arguments": ', "}\n</tool_call>", "\n"),
        ),
        _listed("granite", "<|tool_call|>"),
        _listed("jamba", "<tool_calls>", "</tool_calls>"),
        _listed("nemotron", "<TOOLCALL>", "</TOOLCALL>"),
        _listed("phi4_mini", "<|tool_call|>", "<|/tool_call|>"),
        CallFormat(
            "mistral",
            "[TOOL_CALLS]",
            "",
            CallTemplate("[TOOL_CALLS]{name}[ARGS]", ""),
            heads=(r"NAME\s*+(?:\[CALL_ID\]\s*+(?P<id>[\w-]{0,64}+)\s*+)?\[ARGS\]\s*+(?=\{)",),
        ),
        CallFormat(
            "deepseek_v3",
            _DEEPSEEK_START,
            _DEEPSEEK_END,
            CallTemplate(
                _DEEPSEEK_CALL + "function<｜tool▁sep｜>{name}\n```json\n",
                "\n```" + _DEEPSEEK_CALL_END,
                "\n",
                _DEEPSEEK_START,
                _DEEPSEEK_END,
            ),
            heads=(
                rf"(?:{_DEEPSEEK_CALL})?\s*+function<｜tool▁sep｜>NAME\s*+```(?:json)?\s*+(?=\{{)",
            ),
            opener=_DEEPSEEK_CALL,
            opener_at_line_start=False,
            skipped=("```", _DEEPSEEK_CALL_END),
            closers=("```", _DEEPSEEK_CALL_END),
        ),
        CallFormat(
            "deepseek_v31",
            _DEEPSEEK_START,
            _DEEPSEEK_END,
            CallTemplate(
                _DEEPSEEK_CALL + "{name}<｜tool▁sep｜>",
                _DEEPSEEK_CALL_END,
                "",
                _DEEPSEEK_START,
                _DEEPSEEK_END,
            ),
            heads=(rf"(?:{_DEEPSEEK_CALL})?\s*+NAME\s*+<｜tool▁sep｜>\s*+(?=\{{)",),
            opener=_DEEPSEEK_CALL,
            opener_at_line_start=False,
            skipped=(_DEEPSEEK_CALL_END,),
            closers=(_DEEPSEEK_CALL_END,),
        ),
        _dsml("deepseek_v32", "function_calls"),
        _dsml("deepseek_v4", "tool_calls"),
        CallFormat(
            "kimi_k2",
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            CallTemplate(
                "<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>",
                "<|tool_call_end|>",
                before="<|tool_calls_section_begin|>",
                after="<|tool_calls_section_end|>",
            ),
            heads=(
                r"(?:<\|tool_call_begin\|>)?\s*+(?P<id>(?:functions\.)?NAME(?::\d+)?)\s*+"
                r"<\|tool_call_argument_begin\|>\s*+(?=\{)",
            ),
            opener="<|tool_call_begin|>",
            opener_at_line_start=False,
            skipped=("<|tool_call_end|>",),
            closers=("<|tool_call_end|>",),
        ),
        CallFormat(
            "kimi_k3",
            "<|open|>tools<|sep|>",
            "<|close|>tools<|sep|>",
            CallTemplate(
                '<|open|>call tool="{name}" index="{number}"<|sep|><|open|>json type="object"'
                "<|sep|>",
                "<|close|>json<|sep|><|close|>call<|sep|>",
                before="<|open|>tools<|sep|>",
                after="<|close|>tools<|sep|>",
            ),
            heads=(
                r'<\|open\|>call tool="NAME"[^<>]{0,100}<\|sep\|>'
                r"(?=\s*+<\|(?:open\|>argument |close\|))",
                r'<\|open\|>call tool="NAME"[^<>]{0,100}<\|sep\|>\s*+<\|open\|>json[^<>]{0,100}'
                r"<\|sep\|>\s*+(?=\{)",
            ),
            opener="<|open|>call ",
            opener_at_line_start=False,
            skipped=("<|close|>json<|sep|>", "<|close|>call<|sep|>"),
            closers=("<|close|>json<|sep|>",),
            tags=Tags(
                rf'<\|open\|>argument key="{KEY}" type="(?P<kind>\w+)"<\|sep\|>',
                "<|close|>argument<|sep|>",
                "<|close|>call<|sep|>",
            ),
        ),
        _functions("qwen3_coder", "tool_call", "\n"),
        _functions("seed_oss", "seed:tool_call"),
        _pairs("glm47"),
        _pairs("laguna"),
        _pairs("longcat", "longcat_"),
        _invokes(
            "minimax_m2",
            "<minimax:tool_call>",
            "</minimax:tool_call>",
            CallTemplate(
                '<invoke name="{name}">\n',
                "</invoke>\n",
                argument='<parameter name="{key}">',
                argument_end="</parameter>\n",
            ),
            r"<invoke name=[\"']?NAME[\"']?>(?=\s*+<)",
            Tags(rf"<parameter name=[\"']?{KEY}[\"']?>", "</parameter>", "</invoke>"),
            "<invoke name=",
        ),
        _invokes(
            "muse_spark",
            "<atem:function_calls>",
            "</atem:function_calls>",
            CallTemplate(
                '<atem:invoke name="{name}">\n',
                "</atem:invoke>\n",
                argument='<atem:parameter name="{key}">',
                argument_end="</atem:parameter>\n",
            ),
            rf'<atem:invoke\s++{_ATTRIBUTES}name="NAME"\s*+{_ATTRIBUTES}>(?=\s*+<)',
            Tags(
                rf'<atem:parameter\s++{_ATTRIBUTES}name="{KEY}"\s*+{_ATTRIBUTES}>',
                "</atem:parameter>",
                "</atem:invoke>",
                guesses=True,
            ),
            "<atem:invoke ",
        ),
        _invokes(
            "minimax_m3",
            f"{_MINIMAX}<tool_call>",
            f"{_MINIMAX}</tool_call>",
            CallTemplate(
                _MINIMAX + '<invoke name="{name}">',
                f"{_MINIMAX}</invoke>\n",
                argument=_MINIMAX + "<{key}>",
                argument_end=_MINIMAX + "</{key}>",
            ),
            r'\]<\]minimax\[>\[<invoke name="NAME">(?=\s*+\])',
            Tags(
                r"\]<\]minimax\[>\[<(?P<key>[^<>/][^<>]{0,255})>",
                _MINIMAX + "</{key}>",
                f"{_MINIMAX}</invoke>",
                guesses=True,
                element=_MINIMAX,
            ),
            f"{_MINIMAX}<invoke ",
        ),
        CallFormat(
            "minicpm5",
            "<function name=",
            "</function>",
            CallTemplate(
                '<function name="{name}">',
                "</function>",
                argument='<param name="{key}">',
                argument_end="</param>",
            ),
            heads=(r"[\"']?NAME[\"']?\s*+>(?=\s*+<)",),
            tags=Tags(rf"<param\s++name\s*+=\s*+[\"']?{KEY}[\"']?\s*+>", "</param>", cdata=True),
        ),
        _braces("gemma4", "<|tool_call>", "<tool_call|>", '<|"|>'),
        _braces("function_gemma", "<start_function_call>", "<end_function_call>", "<escape>"),
        CallFormat(
            "pythonic",
            "<|tool_call_start|>",
            "<|tool_call_end|>",
            CallTemplate(
                "{name}(",
                ")",
                ", ",
                "<|tool_call_start|>[",
                "]<|tool_call_end|>",
                argument="{key}=",
                separator=", ",
            ),
            heads=(
                r"(?P<list>\[\s*+)?NAME\s*+(?=\(\s*+(?:\)|\*\*|['\"{[\d-]|"
                r"[^][(){},='\"]{1,256}?\s*+=(?!=)\s*+[^\s,)]))",
            ),
            style=PYTHON_CALLS,
        ),
    )
}
"""By the value of `--tool-parser`. `json` and `harmony` are the others."""

_Known = Callable[[str, Container[str]], bool]
_SIGNS: tuple[tuple[str, _Known], ...] = (
    ("deepseek_v4", lambda source, _: "DSML｜" in source and "function_calls" not in source),
    ("deepseek_v32", lambda source, vocabulary: "DSML｜" in source or "｜DSML｜" in vocabulary),
    ("deepseek_v3", lambda source, _: _DEEPSEEK_START in source and "```json" in source),
    ("deepseek_v31", lambda source, _: _DEEPSEEK_START in source),
    ("seed_oss", lambda source, _: "<seed:tool_call>" in source),
    ("nemotron", lambda source, _: "<TOOLCALL>" in source),
    ("jamba", lambda source, _: "<tool_calls>" in source),
    # Templates that only describe calls to the model, such as SmolLM3's.
    ("json_tools", lambda source, _: "<tool_call>" in source),
    ("phi4_mini", lambda _, vocabulary: "<|/tool_call|>" in vocabulary),
    ("granite", lambda source, _: "<|tool_call|>" in source),
)
"""Formats unknown to mlx-lm, by a sign in the template's text or in the vocabulary. The first that
applies counts."""
