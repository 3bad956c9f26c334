"""The grammars as llguidance reads them: calls are accepted, other text is not."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from router.schemas.conversation import FunctionDefinition
from router.tokens.parsing.calls import written_calls
from router.tokens.parsing.formats import CALL_FORMATS, MUSE, ReasoningMarkers
from router.tokens.parsing.grammars import call_format, calls_grammar, messages_grammar
from router.tokens.parsing.lark_parts import ControlTokens
from tests.router.chat_tokenizer import write_chat_tokenizer
from tests.router.tokens.parsing.test_marked import format_of, named, read

MARKERS = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]"),
    *("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>"),
)
PROPERTIES = {
    "city": {"type": "string"},
    "days": {"$ref": "#/$defs/days"},
    "unit": {"enum": ["C", "F"]},
}
SCHEMA: dict[str, Any] = {"type": "object", "properties": PROPERTIES}
SCHEMA |= {"$defs": {"days": {"type": "integer"}}, "required": ["city", "days"]}
SCHEMA |= {"additionalProperties": False}
WEATHER = FunctionDefinition(name="get_weather", strict=True, parameters=SCHEMA)
NOTHING = FunctionDefinition(name="nothing")
FUNCTIONS = [WEATHER, NOTHING]
TOOLS = [{"type": "function", "function": {"name": f.name, "parameters": f.parameters or {}}}
         for f in FUNCTIONS]  # fmt: skip

CALLS = {
    name: written_calls(each, [{"name": "get_weather", "arguments": {"city": "B<", "days": 3}}])
    for name, each in CALL_FORMATS.items()
}


class Checker:
    """Matches text by a grammar, with a tokenizer that has control tokens."""

    def __init__(self, markers: tuple[str, ...] = MARKERS) -> None:
        with tempfile.TemporaryDirectory() as directory:
            self.tokenizer: Tokenizer = write_chat_tokenizer(Path(directory), markers=markers)
        added = json.loads(self.tokenizer.to_str())["added_tokens"]
        # "[ARGS]" is not special here, so that both kinds occur.
        control = [each for each in added if each["special"] or each["content"][0] == "<"]
        self.tokens = ControlTokens({each["content"]: each["id"] for each in control})
        size = self.tokenizer.get_vocab_size()
        self.guide = LLTokenizer(self.tokenizer.to_str(), n_vocab=size, eos_token=[1])

    def accepts(self, grammar: str, text: str) -> bool:
        matcher = LLMatcher(self.guide, LLMatcher.grammar_from_lark(grammar), log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.fixture(scope="module")
def checker() -> Checker:
    return Checker()


def grammar_for(parser: str, checker: Checker, **options: Any) -> str:
    format = CALL_FORMATS[parser]
    return calls_grammar(format, FUNCTIONS, checker.tokens, **{"parallel": True, **options})


@pytest.mark.parametrize("parser", CALLS)
def test_a_grammar_accepts_the_calls_that_its_parser_reads(checker: Checker, parser: str) -> None:
    call = CALLS[parser]
    grammar = grammar_for(parser, checker)
    assert checker.accepts(grammar, call)
    part = read(call, format_of(parser), tools=TOOLS)
    assert named(part.calls) == [("get_weather", {"city": "B<", "days": 3})]
    changes = (("get_weather", "get_time"), ("3", "three"), ("3", "3.5"), ("days", "hours"))
    for wrong in ("", "Well. " + call, call[:-3], *(call.replace(*each) for each in changes)):
        assert not checker.accepts(grammar, wrong), wrong


@pytest.mark.parametrize(
    "parser", ["json_tools", "qwen3_coder", "kimi_k2", "json", "gemma4", "pythonic"]
)
def test_several_calls_are_accepted_only_if_parallel(checker: Checker, parser: str) -> None:
    template = CALL_FORMATS[parser].template
    call = CALLS[parser].removeprefix(template.before).removesuffix(template.after)
    twice = template.before + call + template.between + call + template.after
    assert checker.accepts(grammar_for(parser, checker), twice)
    assert not checker.accepts(grammar_for(parser, checker, parallel=False), twice)
    assert len(read(twice, format_of(parser), tools=TOOLS).calls) == 2


def test_reasoning_before_calls_is_accepted_only_if_allowed(checker: Checker) -> None:
    text = "<think>\nIs 1 < 2?\n</think>\n\n" + CALLS["json_tools"]
    think = ReasoningMarkers("<think>", "</think>")
    assert checker.accepts(grammar_for("json_tools", checker, think=think), text)
    assert not checker.accepts(grammar_for("json_tools", checker), text)


@pytest.mark.parametrize("parser", ["json_tools", "minicpm5", "gemma4", "pythonic"])
def test_optional_calls_may_have_text_around_them(checker: Checker, parser: str) -> None:
    start = format_of(parser).tools.start  # type: ignore[union-attr]
    grammar = grammar_for(parser, checker, optional=True)
    call = CALLS[parser]
    for text in ("Hello <b> & 日本", "First.\n" + call, call + "\nDone.", ""):
        assert checker.accepts(grammar, text), text
    for text in (call.replace("3", "three"), "x" + start, call[:-3]):
        assert not checker.accepts(grammar, text), text


def test_markers_of_an_answer_s_structure_may_occur_around_optional_calls() -> None:
    checker = Checker(markers=("<|open|>", "<|close|>", "<|sep|>"))
    response = "<|open|>response<|sep|>", "<|close|>response<|sep|>"
    grammar = grammar_for("kimi_k3", checker, optional=True, structure=response)
    call = CALLS["kimi_k3"]
    for text in ("Hi.", "Hi.".join(response), "Hi.".join(response) + call, call):
        assert checker.accepts(grammar, text), text
    for text in ("<|open|>other<|sep|>", call.replace("3", "three"), call + call):
        assert not checker.accepts(grammar, text), text


def takes(checker: Checker, parameters: Any, arguments: str, *, strict: bool | None = None) -> bool:
    """Return whether a function with ``parameters`` may be called with ``arguments``."""
    function = FunctionDefinition(name="f", parameters=parameters, strict=strict)
    grammar = calls_grammar(CALL_FORMATS["json"], [function], checker.tokens, parallel=False)
    return checker.accepts(grammar, f'{{"name": "f", "arguments": {arguments}}}')


def test_unknown_keywords_of_a_schema_are_ignored_unless_it_is_strict(checker: Checker) -> None:
    odd = {"type": "object", "properties": {"x": {"type": "array", "contains": {"const": 1}}}}
    assert takes(checker, odd, '{"x": [2]}', strict=False)
    with pytest.raises(AssertionError, match="contains"):
        takes(checker, odd, '{"x": [2]}', strict=True)


def of(**properties: Any) -> dict[str, Any]:
    return {"properties": properties}


@pytest.mark.parametrize(
    ("parameters", "arguments", "others"),
    [
        (None, "{}", '{"x": 1}'),
        ({"type": "object", "properties": {}}, "{}", '{"x": 1}'),
        (of(a={"type": "integer"}), '{"a": 3}', '{"a": 3, "b": 4}'),
        (of(a=of(b={"type": "null"})), '{"a": {"b": null}}', '{"a": {"b": null, "c": 1}}'),
    ],
)
def test_only_arguments_that_the_schema_names_are_accepted(
    checker: Checker, parameters: dict[str, Any] | None, arguments: str, others: str
) -> None:
    assert takes(checker, parameters, arguments)
    assert not takes(checker, parameters, others)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        of() | {"additionalProperties": True},
        of(a=True) | {"patternProperties": {"^b": {"type": "integer"}}},
        of(a=True) | {"required": ["b"]},
        of(a=True) | {"allOf": [of(b=True) | {"required": ["b"]}]},
        of() | {"minProperties": 1},
    ],
)
def test_other_arguments_are_accepted_if_the_schema_allows(checker: Checker, schema: Any) -> None:
    assert takes(checker, {"type": "object", **schema}, '{"b": 1}')


@pytest.mark.parametrize(
    "inner",
    [{"required": True}, {"required": [["b"]]}, {"enum": 5}, {"properties": 5}, {"minItems": "2"}],
)
@pytest.mark.parametrize("parser", ["json", "qwen3_coder", "gemma4", "pythonic"])
def test_a_senseless_schema_is_for_the_compiler(checker: Checker, parser: str, inner: Any) -> None:
    odd = {"type": "object", **of(a=of(b={}) | inner)}
    function = FunctionDefinition(name="f", parameters=odd)
    written = calls_grammar(CALL_FORMATS[parser], [function], checker.tokens, parallel=False)
    assert next(iter(inner)) in written


def test_a_model_without_the_token_for_arguments_writes_mistral_s_older_calls(
    checker: Checker,
) -> None:
    assert call_format("mistral", checker.tokens).template.before == "[TOOL_CALLS]["
    newer = ControlTokens({"[ARGS]": 5})
    assert call_format("mistral", newer) is CALL_FORMATS["mistral"]


def test_optional_strict_calls_cannot_begin_without_their_marker(checker: Checker) -> None:
    grammar = grammar_for("qwen3_coder", checker, optional=True)
    assert checker.accepts(grammar, "Write <function=f> there.\n" + CALLS["qwen3_coder"])
    assert not checker.accepts(grammar, "So.\n<function=f>")
    assert not checker.accepts(grammar, " <function=f>")


def test_numbers_have_no_digits_without_end(checker: Checker) -> None:
    parameters = of(x={"type": "number"}, i={"type": ["integer", "null"]})
    for value in ("5", "-0.25", "1.000001", "9" * 15, "1e-7", "2.5E+20"):
        assert takes(checker, parameters, f'{{"x": {value}}}')
    for value in ("9" * 20, "1." + "3" * 30, "1e" + "9" * 5):
        assert not takes(checker, parameters, f'{{"x": {value}}}')
        assert not takes(checker, parameters, f'{{"i": {value}}}')
    assert takes(checker, parameters, '{"i": null}') and takes(checker, parameters, "{}")
    assert takes(checker, parameters, '{"x": 1e5, "i": 3}')
    assert not takes(checker, {**parameters, "required": ["i"]}, '{"x": 1e5}')


@pytest.mark.parametrize("required", [True, False])
def test_messages_of_muse_end_with_text_or_calls(required: bool) -> None:
    tokens = Checker(markers=("<|message|>", "<|eom|>", "<|start|>"))
    format = CALL_FORMATS["muse_spark"]
    if required:
        options: dict[str, Any] = {"think": MUSE.reasoning, "first_call": MUSE.first_call}
        grammar = grammar_for("muse_spark", tokens, **options)
    else:
        grammar = messages_grammar(MUSE, format, FUNCTIONS, tokens.tokens, parallel=True)
    thought = " to=self<|message|>Let me see.<|eom|><|start|>assistant"
    for before in (
        "",
        thought,
        " to=get_weather<|message|>",
        thought + " to=get_weather<|message|>",
    ):
        assert tokens.accepts(grammar, before + CALLS["muse_spark"])
        assert not tokens.accepts(grammar, before + CALLS["muse_spark"].replace("3", "three"))
    assert tokens.accepts(grammar, thought + " to=user<|message|>Hi <b>.") is not required
