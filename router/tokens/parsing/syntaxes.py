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


def _tagged(
    name: str,
    start: str,
    end: str,
    call: tuple[str, str],
    argument: tuple[str, str],
    tags: Tags | None = None,
    *,
    opener: str = "",
    head: str = "",
    follows: str = "<",
    others: tuple[str, ...] = (),
    between: str = "",
) -> CallFormat:
    """Return the format with a tag for each argument. ``call`` and ``argument`` are what is written
    around calls and values; `_expression` makes what is read of them, unless ``head`` or ``tags``
    say more. A head counts if ``follows`` does; ``others`` are further heads. Calls that do not
    begin with ``start`` are in one element."""
    begin, after_call = call
    before, after = ("", "") if begin.startswith(start) else (f"{start}\n", end)
    template = CallTemplate(*call, between, before, after, *argument)
    head = head or _expression(begin.removeprefix(start))
    tags = tags or Tags()
    tags = tags._replace(
        argument=tags.argument or _expression(argument[0]),
        close=argument[1].strip(),
        end=after_call.removesuffix(end).strip(),
    )
    heads = (rf"{head}(?=\s*+{follows})", *others)
    return CallFormat(name, start, end, template, heads, opener, tags=tags)


def _expression(written: str) -> str:
    """Return the expression of a text before a name. Quotes around a name may be missing."""
    lines = map(regex.escape, written.strip().split("\n"))
    found = r"(?:\\n|\s)*+".join(lines).replace(r"\{is_text\}", "(?P<kind>true|false)")
    for field, own in ((r"\{name\}", "NAME"), (r"\{key\}", KEY)):
        optional = f"[\"']?{own}[\"']?"
        found = found.replace(f'="{field}"', f"={optional}").replace(f"={field}", f"={optional}")
        found = found.replace(field, own)
    return found


def _pairs(name: str, prefix: str = "") -> CallFormat:
    """Return the format with a tag for each key and each value."""
    tag, key, value = f"{prefix}tool_call", f"{prefix}arg_key", f"{prefix}arg_value"
    return _tagged(
        name,
        f"<{tag}>",
        f"</{tag}>",
        (f"<{tag}>{{name}}\n", f"</{tag}>"),
        (f"<{key}>{{key}}</{key}>\n<{value}>", f"</{value}>\n"),
        Tags(guesses=True),
        follows=f"<(?:{key}>|/{tag})",
        others=(r"NAME\s*+(?=\{)",),
        between="\n",
    )


def _dsml(name: str, block: str) -> CallFormat:
    """Return the format with DeepSeek's markup, in an element named ``block``."""
    return _tagged(
        name,
        f"<｜DSML｜{block}>",
        f"</｜DSML｜{block}>",
        ('<｜DSML｜invoke name="{name}">\n', "</｜DSML｜invoke>\n"),
        ('<｜DSML｜parameter name="{key}" string="{is_text}">', "</｜DSML｜parameter>\n"),
        opener="<｜DSML｜invoke ",
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
            call_ends=("```", _DEEPSEEK_CALL_END),
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
            call_ends=(_DEEPSEEK_CALL_END,),
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
            call_ends=("<|tool_call_end|>",),
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
            call_ends=("<|close|>json<|sep|>", "<|close|>call<|sep|>"),
            tags=Tags(
                rf'<\|open\|>argument key="{KEY}" type="(?P<kind>\w+)"<\|sep\|>',
                "<|close|>argument<|sep|>",
                "<|close|>call<|sep|>",
            ),
        ),
        _tagged(
            "qwen3_coder",
            "<tool_call>",
            "</tool_call>",
            ("<tool_call>\n<function={name}>\n", "</function>\n</tool_call>"),
            ("<parameter={key}>\n", "\n</parameter>\n"),
            Tags(breaks=True),
            opener="<function=",
            between="\n",
        ),
        _tagged(
            "seed_oss",
            "<seed:tool_call>",
            "</seed:tool_call>",
            ("<seed:tool_call>\n<function={name}>\n", "</function>\n</seed:tool_call>"),
            ("<parameter={key}>", "</parameter>\n"),
            opener="<function=",
            between="\n",
        ),
        _pairs("glm47"),
        _pairs("laguna"),
        _pairs("longcat", "longcat_"),
        _tagged(
            "minimax_m2",
            "<minimax:tool_call>",
            "</minimax:tool_call>",
            ('<invoke name="{name}">\n', "</invoke>\n"),
            ('<parameter name="{key}">', "</parameter>\n"),
            opener="<invoke name=",
        ),
        _tagged(
            "muse_spark",
            "<atem:function_calls>",
            "</atem:function_calls>",
            ('<atem:invoke name="{name}">\n', "</atem:invoke>\n"),
            ('<atem:parameter name="{key}">', "</atem:parameter>\n"),
            Tags(rf'<atem:parameter\s++{_ATTRIBUTES}name="{KEY}"\s*+{_ATTRIBUTES}>', guesses=True),
            head=rf'<atem:invoke\s++{_ATTRIBUTES}name="NAME"\s*+{_ATTRIBUTES}>',
            opener="<atem:invoke ",
        ),
        _tagged(
            "minimax_m3",
            f"{_MINIMAX}<tool_call>",
            f"{_MINIMAX}</tool_call>",
            (_MINIMAX + '<invoke name="{name}">', f"{_MINIMAX}</invoke>\n"),
            (_MINIMAX + "<{key}>", _MINIMAX + "</{key}>"),
            Tags(r"\]<\]minimax\[>\[<(?P<key>[^<>/][^<>]{0,255})>", guesses=True, element=_MINIMAX),
            follows=r"\]",
            opener=f"{_MINIMAX}<invoke ",
        ),
        _tagged(
            "minicpm5",
            "<function name=",
            "</function>",
            ('<function name="{name}">', "</function>"),
            ('<param name="{key}">', "</param>"),
            Tags(rf"<param\s++name\s*+=\s*+[\"']?{KEY}[\"']?\s*+>", cdata=True),
            head=r"[\"']?NAME[\"']?\s*+>",
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
