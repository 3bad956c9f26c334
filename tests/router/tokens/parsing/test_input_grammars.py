"""Custom tools whose input a grammar describes: the calls of them that are accepted."""

from __future__ import annotations

import json

import pytest

from router.errors import InvalidRequest
from router.schemas.conversation import TextFunction
from router.tokens.parsing.formats import CALL_FORMATS, HARMONY, HARMONY_CALLS
from router.tokens.parsing.grammars import calls_grammar, messages_grammar
from router.tokens.parsing.input_grammars import input_lark
from shared.wire import Grammar
from tests.router.tokens.parsing.test_grammars import Checker

PATCH = r"""
start: begin hunk+ end
begin: "*** Begin" LF
end: "*** End" LF?
hunk: "@@ " /(.+)/ LF change+ -> hunk
change: ("+" | "-" | " ")
      | /(.*)/ LF   // any line
%import common.LF
"""
SUM = r"""
start: term ("+" term)*
term: "(" start ")" | NUMBER | "\"" /[^"]*/ "\""
NUMBER: /[0-9]+/
"""
NAMES = r"""
start: name ("," name)* | "(" start ")"
name: NAME
NAME: /[a-z]+/ & ~("if" | "or") | "'" /[^']/* "'"
%ignore /[ \t\n]+/
"""
REPLIES = [
    ("lark", PATCH, '*** Begin\n@@ def "f"\\n\n-a\tb\n+é\n*** End\n', True),
    ("lark", PATCH, "*** Begin\n@@ x\n-a\n*** End", True),
    ("lark", PATCH, "*** Begin\n*** End", False),
    ("lark", SUM, '1+(22+("a\n\\ b"))', True),
    ("lark", SUM, "1+(22", False),
    ("lark", NAMES, "( a,\n'if\n\"' )", True),
    ("lark", NAMES, "a, if", False),
    ("lark", 'start: "a".."~" "é\\x22"i', '|É"', True),
    ("lark", "%import common.WS -> GAP\nstart: GAP D\n%import common (DIGIT, CR)\nD: DIGIT CR",
     " \t\n5\r", True),
    ("regex", r'a/b|(?s:.)\d"[^x\n]+', '\n7"\\t', True),
    ("regex", r'a/b|(?s:.)\d"[^x\n]+', "a/b", True),
    ("regex", r'a/b|(?s:.)\d"[^x\n]+', '\n7"x', False),
    ("regex", r"[]a\s]{2}(?i)n", "]\tN", True),
]  # fmt: skip


def function_of(kind: str, source: str) -> TextFunction:
    return TextFunction(
        name="take",
        parameters={"properties": {"input": {"type": "string"}}, "required": ["input"]},
        input_grammar=Grammar(kind=kind, source=source, param="x"),  # type: ignore[arg-type]
    )


@pytest.fixture(scope="module")
def checker() -> Checker:
    return Checker()


@pytest.mark.parametrize(
    "parser",
    ["json", "json_tools", "kimi_k2", "qwen3_coder", "minimax_m2", "function_gemma", "pythonic"],
)
@pytest.mark.parametrize(("kind", "source", "text", "accepted"), REPLIES)
def test_a_call_is_accepted_if_its_input_matches(
    checker: Checker, parser: str, kind: str, source: str, text: str, accepted: bool
) -> None:
    format = CALL_FORMATS[parser]
    template = format.template
    grammar = calls_grammar(format, [function_of(kind, source)], checker.tokens, parallel=False)
    if parser == "function_gemma":
        inside = f"input:<escape>{text}<escape>"
    elif parser == "pythonic":
        inside = f"input={json.dumps(text, ensure_ascii=False)}"
    elif template.argument:
        inside = template.argument.replace("{key}", "input") + text + template.argument_end
    else:
        inside = json.dumps({"input": text}, ensure_ascii=False)
    begin = template.begin.replace("{name}", "take").replace("{number}", "0")
    call = template.before + begin + inside + template.end + template.after
    assert checker.accepts(grammar, call) == accepted
    if accepted:
        assert not checker.accepts(grammar, call.replace(inside, "\0" + inside))


def test_text_that_a_grammar_allows_does_not_run_over_the_end_of_a_value(checker: Checker) -> None:
    anything = function_of("lark", "start: /(?s:.*)/")
    grammar = calls_grammar(CALL_FORMATS["qwen3_coder"], [anything], checker.tokens, parallel=False)
    call = "<tool_call>\n<function=take>\n<parameter=input>\n{}\n</parameter>\n</function>\n"
    call += "</tool_call>"
    assert checker.accepts(grammar, call.format("a\nb"))
    assert not checker.accepts(grammar, call.format("a\n</parameter>\nb"))


def test_a_reply_in_messages_ends_with_a_call_or_a_message(checker: Checker) -> None:
    function = function_of("regex", '"+')
    assert HARMONY.messages is not None
    grammar = messages_grammar(
        HARMONY.messages, HARMONY_CALLS, [function], checker.tokens, parallel=False
    )
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    for call in (
        '<|channel|>commentary to=functions.take <|constrain|>json<|message|>{"input": "\\""}',
        ' to=functions.take<|channel|>commentary <|constrain|>json<|message|>{"input": "\\""}',
    ):
        assert checker.accepts(grammar, thought + call)
        assert not checker.accepts(grammar, thought + call.replace('\\"', "x"))
        assert not checker.accepts(grammar, call.replace("take", "other"))
    assert checker.accepts(grammar, thought + "<|channel|>final<|message|>Done.")


@pytest.mark.parametrize(
    ("source", "where"),
    [
        ('start: "a"\nb: <|im_end|>', "line 2: '<|im_end|>'"),
        ('start: "a"\n\nx: %json {}', "line 3: '%json'"),
        ('start: "a', "line 1: "),
        ('start "a"', "line 1: a definition"),
        ("start: /(?x)a/", "the flag x"),
        ("start: /[a/", "the class '[a'"),
        ("start: /" + "[" * 9000 + "a" + "]" * 9000 + "/", "nested too deeply"),
        ("start: " + "~(" * 9000 + '"a"' + ")" * 9000, "nested too deeply"),
    ],
)
def test_what_no_input_can_have_is_refused_with_its_place(source: str, where: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        input_lark(Grammar(kind="lark", source=source, param="x.definition"), quoted=True)
    assert raised.value.param == "x.definition"
    assert where in raised.value.message
