"""Grammars that restrict answers to calls of given tools, in the model's own syntax.

The result is Lark in llguidance's dialect:
https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from router.schemas.conversation import FunctionDefinition, TextFunction
from router.tokens.literals import literal_pattern
from router.tokens.parsing.calls import PLAIN_TEMPLATE, CallTemplate
from router.tokens.parsing.formats import CALL_FORMATS, HARMONY_CALLS, ReasoningMarkers
from router.tokens.parsing.input_grammars import input_lark
from router.tokens.parsing.json_reader import JSON_STYLE

_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON formatted as templates format earlier calls, so that it has the same tokens."""

_MAX_CALLS = 16
_OTHER_PROPERTIES = (
    "additionalProperties patternProperties propertyNames unevaluatedProperties minProperties"
    " dependentRequired dependentSchemas dependencies".split()
)
_COMBINED = ("$ref", "anyOf", "oneOf", "allOf", "not", "if")


class ControlTokens:
    """The tokens of a tokenizer that a grammar matches only by token, never as text."""

    def __init__(self, control: Mapping[str, int]) -> None:
        self.control = control
        """Token ids by text."""
        self._pattern = literal_pattern(control)

    def occur_in(self, text: str) -> bool:
        return self._pattern is not None and self._pattern.search(text) is not None

    def to_lark(self, text: str) -> str:
        """Return an expression that matches exactly ``text``; empty if there is no text."""
        if not text:
            return ""
        pieces: list[str] = []
        end = 0
        for found in self._pattern.finditer(text) if self._pattern is not None else ():
            pieces += (_quoted(text[end : found.start()]), f"<[{self.control[found[0]]}]>")
            end = found.end()
        return " ".join(filter(None, [*pieces, _quoted(text[end:])]))

    def text_without(self, *excluded: str) -> str:
        """Return a terminal for any text without ``excluded`` and without control tokens."""
        spelled = [each for each in excluded if each not in self.control]
        anything = "/(?s:.*)/"
        return " & ".join([anything, *(f"~/(?s:.*{_regex(each)}.*)/" for each in spelled if each)])


def _quoted(text: str) -> str:
    """Return a Lark string for ``text``; empty if the text is empty."""
    return json.dumps(text, ensure_ascii=False) if text else ""


def call_template(
    parser: str, functions: Sequence[FunctionDefinition], tokens: ControlTokens
) -> CallTemplate | None:
    """Return the syntax of calls of ``functions`` for ``parser``; None if unknown."""
    if parser == "mistral" and "[ARGS]" not in tokens.control:
        return PLAIN_TEMPLATE._replace(before="[TOOL_CALLS][", between=", ", after="]")
    format = CALL_FORMATS[parser]
    if format.style is not JSON_STYLE:
        return None
    template = format.template
    if template.argument:
        combined = any(key in (f.parameters or {}) for key in _COMBINED for f in functions)
        return None if combined else template
    return template


def calls_grammar(
    template: CallTemplate,
    functions: Sequence[FunctionDefinition],
    tokens: ControlTokens,
    *,
    parallel: bool,
    think: ReasoningMarkers | None = None,
    excluded_text: str | None = None,
    alternative: str | None = None,
) -> str:
    """Return the Lark grammar of answers that call ``functions``, once or, if ``parallel``, several
    times.

    Reasoning between ``think`` may come first. With ``excluded_text``, text without it may surround
    calls or replace them. ``alternative`` is a rule for other answers.
    """
    rules = _alternatives("call", template, functions, tokens)
    between = tokens.to_lark(template.between) if template.between else ""
    more = f" ({between} call){{0,{_MAX_CALLS - 1}}}" if parallel else ""
    before, after = (tokens.to_lark(part) for part in (template.before, template.after))
    start = f"{before} call{more} {after}".strip()
    if alternative is not None:
        rules.append(f"instead: {alternative}")
        start = f"({start} | instead)"
    if excluded_text is not None:
        rules.append(f"TEXT: {tokens.text_without(excluded_text)}")
        if excluded_text in tokens.control:
            start = f"TEXT ({start} TEXT)?"
        else:
            # The text may include the start of a call, which is only recognized once it is
            # complete.
            rules.append(f"lead[suffix={json.dumps(excluded_text)}]: /(?s:.*)/")
            begun = template._replace(begin=template.begin.removeprefix(excluded_text))
            opened = begun if not template.before else template
            rules += _alternatives("first", opened, functions, tokens)
            before = tokens.to_lark(template.before.removeprefix(excluded_text))
            start = f"(TEXT | lead {before} first{more} {after} TEXT?)"
    if think is not None:
        rules.append(f"THOUGHT: {tokens.text_without(think.end)}")
        rules.append(f"thought: {tokens.to_lark(think.start)} THOUGHT {tokens.to_lark(think.end)}")
        rules.append("SPACE: /[ \\n]{0,4}/")
        start = f"(thought SPACE)? {start}"
    return "\n".join([f"start: {start}", *rules])


def messages_grammar(functions: Sequence[FunctionDefinition], tokens: ControlTokens) -> str:
    """Return the Lark grammar of answers in gpt-oss' messages, with calls of ``functions``:
    messages with any text, and finally one more or a call. A call names its function after its
    channel, as the model does, or before it, as the template does."""
    own = HARMONY_CALLS.template
    addressed = own._replace(
        begin=" to=functions.{name}<|channel|>commentary <|constrain|>json<|message|>"
    )
    channel, message = tokens.to_lark("<|channel|>"), tokens.to_lark("<|message|>")
    return "\n".join(
        [
            "start: (message gap)* (message | call | addressed)",
            f"message: {channel} CHANNEL {message} TEXT",
            'CHANNEL: "analysis" | "commentary" | "final"',
            f"TEXT: {tokens.text_without()}",
            f"gap: {tokens.to_lark('<|end|><|start|>assistant')}",
            *_alternatives("call", own, functions, tokens),
            *_alternatives("addressed", addressed, functions, tokens),
        ]
    )


def _alternatives(
    rule: str,
    template: CallTemplate,
    functions: Sequence[FunctionDefinition],
    tokens: ControlTokens,
) -> list[str]:
    """Return rules in which ``rule`` is a call of any of ``functions``."""
    rules = []
    for number, function in enumerate(functions):
        rules += _call_rules(f"{rule}{number}", template, function, tokens)
    return [*rules, f"{rule}: " + " | ".join(f"{rule}{n}" for n in range(len(functions)))]


def _call_rules(
    rule: str, template: CallTemplate, function: FunctionDefinition, tokens: ControlTokens
) -> list[str]:
    """Return rules in which ``rule`` is a call of ``function``."""
    begin = template.begin.replace("{name}", function.name)
    parts = [tokens.to_lark(part) for part in begin.split("{number}")]
    rules = []
    if "{number}" in begin:
        rules.append(f"{rule}_number: /[0-9]{{1,3}}/")
    if not template.argument and isinstance(function, TextFunction):
        opening, closing = json.dumps('{"input": "'), json.dumps('"}')
        text = input_lark(function.input_grammar, quoted=True)
        rules.append(f"{rule}_arguments: {opening} {text} {closing}")
        arguments = [f"{rule}_arguments"]
    elif not template.argument:
        parameters = function.parameters or {"type": "object", "properties": {}}
        rules.append(f"{rule}_arguments: {_json(parameters, function)}")
        arguments = [f"{rule}_arguments"]
    else:
        arguments, more = _arguments(rule, template, function, tokens)
        rules += more
    end = [tokens.to_lark(template.end)] if template.end else []
    return [f"{rule}: {' '.join([f' {rule}_number '.join(parts), *arguments, *end])}", *rules]


def _arguments(
    rule: str, template: CallTemplate, function: FunctionDefinition, tokens: ControlTokens
) -> tuple[list[str], list[str]]:
    """Return an expression for each parameter of ``function``, in order, and their rules. Optional
    parameters may be omitted."""
    expressions, rules = [], []
    parameters: Mapping[str, Any] = function.parameters or {}
    required = frozenset(parameters.get("required") or ())
    end = tokens.to_lark(template.argument_end)
    for number, (key, schema) in enumerate((parameters.get("properties") or {}).items()):
        name = f"{rule}_argument{number}"
        expressions.append(name if key in required else f"{name}?")
        own = schema if isinstance(schema, dict) else {}
        choices = own.get("enum")
        is_text = True
        if isinstance(function, TextFunction):
            value = _text_of_grammar(function, template.argument_end, tokens)
        elif isinstance(choices, list) and choices and all(isinstance(c, str) for c in choices):
            quoted = (json.dumps(each, ensure_ascii=False) for each in choices)
            value = f"({' | '.join(quoted)}) {end}"
        elif own.get("type") == "string":
            value = f"{name}_value"
            rules.append(_text_up_to(value, template.argument_end, tokens))
        else:
            is_text = False
            value = f"{name}_value {end}"
            shared = {k: parameters[k] for k in ("$defs", "definitions") if k in parameters}
            rules.append(f"{name}_value: {_json({**shared, **own}, function)}")
        written = template.argument.replace("{is_text}", json.dumps(is_text))
        opening = tokens.to_lark(written.replace("{key}", key))
        rules.append(f"{name}: {opening} {value}")
    return expressions, rules


def _text_of_grammar(function: TextFunction, end: str, tokens: ControlTokens) -> str:
    if tokens.occur_in(end):
        return f"{input_lark(function.input_grammar, quoted=False)} {tokens.to_lark(end.lstrip())}"
    return input_lark(function.input_grammar, quoted=False, end=end)


def _text_up_to(rule: str, end: str, tokens: ControlTokens) -> str:
    if tokens.occur_in(end):
        # Text cannot contain its control token, so whitespace before the token may belong to the
        # text.
        return f"{rule}: /(?s:.*)/ {tokens.to_lark(end.lstrip())}"
    return f"{rule}[suffix={json.dumps(end)}]: /(?s:.*)/"


def _json(schema: Mapping[str, Any], function: FunctionDefinition) -> str:
    """Return the rule of a schema. Keywords unknown to llguidance are an error if the function is
    strict, and ignored otherwise."""
    style = _JSON_STYLE if function.strict else {**_JSON_STYLE, "lenient": True}
    kind = {"type": "object"} if "properties" in schema else {}
    return json_rule(_closed({**kind, **schema}), style)


def _closed(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return ``schema`` limited to the properties that it names, unless it specifies others. A tool
    expects no others, and a small model would keep inventing them."""
    properties = schema.get("properties")
    if not isinstance(properties, dict) or any(key in schema for key in _COMBINED):
        return schema
    own = {k: _closed(v) if isinstance(v, dict) else v for k, v in properties.items()}
    names_all = _names_all(properties, schema.get("required"))
    if not names_all or any(key in schema for key in _OTHER_PROPERTIES):
        return {**schema, "properties": own}
    return {**schema, "properties": own, "additionalProperties": False}


def _names_all(properties: Mapping[str, Any], required: object) -> bool:
    """Return whether ``required``, which may be anything that a client wrote, names only
    ``properties``."""
    if not required:
        return True
    names = required if isinstance(required, list) else [required]
    return all(isinstance(name, str) and name in properties for name in names)


def json_rule(schema: Mapping[str, Any], style: Mapping[str, Any] = _JSON_STYLE) -> str:
    """Return the expression of JSON that is valid under ``schema``."""
    return "%json " + json.dumps({**schema, "x-guidance": style}, ensure_ascii=False)


def _regex(text: str) -> str:
    return re.sub(r"[\\.^$|?*+()\[\]{}/]", r"\\\g<0>", text).replace("\n", "\\n")
