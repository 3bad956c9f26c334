"""Grammars that restrict answers to calls of given tools, in the model's own syntax.

The result is Lark in llguidance's dialect:
https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from router.schemas.conversation import FunctionDefinition, TextFunction
from router.tokens.parsing.calls import PLAIN_TEMPLATE, CallTemplate
from router.tokens.parsing.formats import CALL_FORMATS, HARMONY_CALLS, ReasoningMarkers
from router.tokens.parsing.input_grammars import input_lark
from router.tokens.parsing.json_reader import JSON_STYLE
from router.tokens.parsing.lark_parts import ControlTokens, function_json
from router.tokens.parsing.tagged_grammars import TaggedCall

_MAX_CALLS = 16


def call_template(parser: str, tokens: ControlTokens) -> CallTemplate | None:
    """Return the syntax of calls for ``parser``; None if a grammar of them is unknown."""
    if parser == "mistral" and "[ARGS]" not in tokens.control:
        return PLAIN_TEMPLATE._replace(before="[TOOL_CALLS][", between=", ", after="]")
    format = CALL_FORMATS[parser]
    return format.template if format.style is JSON_STYLE else None


def calls_grammar(
    template: CallTemplate,
    functions: Sequence[FunctionDefinition],
    tokens: ControlTokens,
    *,
    parallel: bool,
    think: ReasoningMarkers | None = None,
    excluded_text: str | None = None,
    other_opener: str = "",
    alternative: str | None = None,
) -> str:
    """Return the Lark grammar of answers that call ``functions``, once or, if ``parallel``, several
    times.

    Reasoning between ``think`` may come first. With ``excluded_text``, text without it may surround
    calls or replace them; a line of it does not begin with ``other_opener``. ``alternative`` is a
    rule for other answers.
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
        text = tokens.text_without(excluded_text, at_line_start=other_opener)
        rules.append(f"TEXT: {text}")
        if excluded_text in tokens.control:
            start = f"TEXT ({start} TEXT)?"
        else:
            # The text may include the start of a call, which is only recognized once it is
            # complete.
            rules.append(f"LEAD: {tokens.text_without(at_line_start=other_opener)}")
            rules.append(f"lead[suffix={json.dumps(excluded_text)}]: LEAD")
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
    head = f" {rule}_number ".join(tokens.to_lark(part) for part in begin.split("{number}"))
    rules = []
    if "{number}" in begin:
        rules.append(f"{rule}_number: /[0-9]{{1,3}}/")
    if template.argument:
        tagged = TaggedCall(rule, template, function, tokens).rules()
        return [f"{rule}: {head} {rule}_more", *rules, *tagged]
    if isinstance(function, TextFunction):
        opening, closing = json.dumps('{"input": "'), json.dumps('"}')
        arguments = f"{opening} {input_lark(function.input_grammar, quoted=True)} {closing}"
    else:
        parameters = function.parameters or {"type": "object", "properties": {}}
        arguments = function_json(parameters, function)
    rules.append(f"{rule}_arguments: {arguments}")
    end = [tokens.to_lark(template.end)] if template.end else []
    return [f"{rule}: {' '.join([head, f'{rule}_arguments', *end])}", *rules]
