"""Grammars that restrict answers to calls of given tools, in the model's own syntax.

The result is Lark in llguidance's dialect:
https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from router.schemas.conversation import FunctionDefinition, TextFunction
from router.tokens.parsing.calls import PLAIN_TEMPLATE, CallFormat
from router.tokens.parsing.formats import CALL_FORMATS, HARMONY_CALLS, ReasoningMarkers
from router.tokens.parsing.input_grammars import input_lark
from router.tokens.parsing.json_reader import JSON_STYLE
from router.tokens.parsing.lark_parts import ControlTokens, function_json
from router.tokens.parsing.listed_grammars import ListedCall
from router.tokens.parsing.tagged_grammars import TaggedCall

_MAX_CALLS = 16


def call_format(name: str, tokens: ControlTokens) -> CallFormat:
    """Return the format of the tool parser ``name``, as the model with ``tokens`` writes it."""
    format = CALL_FORMATS[name]
    if name == "mistral" and "[ARGS]" not in tokens.control:
        listed = PLAIN_TEMPLATE._replace(before="[TOOL_CALLS][", between=", ", after="]")
        return format._replace(template=listed)
    return format


def calls_grammar(
    format: CallFormat,
    functions: Sequence[FunctionDefinition],
    tokens: ControlTokens,
    *,
    parallel: bool,
    think: ReasoningMarkers | None = None,
    optional: bool = False,
    structure: Sequence[str] = (),
    alternative: str | None = None,
) -> str:
    """Return the Lark grammar of answers that call ``functions``, once or, if ``parallel``, several
    times.

    Reasoning between ``think`` may come first. If calls are ``optional``, text may surround them or
    replace them, without what begins calls; the markers ``structure`` may occur in it.
    ``alternative`` is a rule for other answers.
    """
    template = format.template
    rules = _alternatives("call", format, functions, tokens)
    between = tokens.to_lark(template.between) if template.between else ""
    more = f" ({between} call){{0,{_MAX_CALLS - 1}}}" if parallel else ""
    before, after = (tokens.to_lark(part) for part in (template.before, template.after))
    start = f"{before} call{more} {after}".strip()
    if alternative is not None:
        rules.append(f"instead: {alternative}")
        start = f"({start} | instead)"
    if optional:
        marker, opener = format.start, format.opener
        rules.append(f"TEXT: {tokens.text_without(marker, at_line_start=opener)}")
        parts = [tokens.to_lark(each) for each in structure if tokens.occur_in(each)]
        rules.append(f"text: TEXT (({' | '.join(parts)}) TEXT)*" if parts else "text: TEXT")
        if tokens.occur_in(marker):
            start = f"text ({start} text)?"
        else:
            # The text may include the start of a call, which is only recognized once it is
            # complete.
            rules.append(f"LEAD: {tokens.text_without(at_line_start=opener)}")
            rules.append(f"lead[suffix={json.dumps(marker)}]: LEAD")
            begun = template._replace(begin=template.begin.removeprefix(marker))
            opened = begun if not template.before else template
            rules += _alternatives("first", format._replace(template=opened), functions, tokens)
            before = tokens.to_lark(template.before.removeprefix(marker))
            start = f"(text | lead {before} first{more} {after} text?)"
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
    begin = " to=functions.{name}<|channel|>commentary <|constrain|>json<|message|>"
    addressed = HARMONY_CALLS._replace(template=HARMONY_CALLS.template._replace(begin=begin))
    channel, message = tokens.to_lark("<|channel|>"), tokens.to_lark("<|message|>")
    return "\n".join(
        [
            "start: (message gap)* (message | call | addressed)",
            f"message: {channel} CHANNEL {message} TEXT",
            'CHANNEL: "analysis" | "commentary" | "final"',
            f"TEXT: {tokens.text_without()}",
            f"gap: {tokens.to_lark('<|end|><|start|>assistant')}",
            *_alternatives("call", HARMONY_CALLS, functions, tokens),
            *_alternatives("addressed", addressed, functions, tokens),
        ]
    )


def _alternatives(
    rule: str,
    format: CallFormat,
    functions: Sequence[FunctionDefinition],
    tokens: ControlTokens,
) -> list[str]:
    """Return rules in which ``rule`` is a call of any of ``functions``."""
    rules = []
    for number, function in enumerate(functions):
        rules += _call_rules(f"{rule}{number}", format, function, tokens)
    return [*rules, f"{rule}: " + " | ".join(f"{rule}{n}" for n in range(len(functions)))]


def _call_rules(
    rule: str, format: CallFormat, function: FunctionDefinition, tokens: ControlTokens
) -> list[str]:
    """Return rules in which ``rule`` is a call of ``function``."""
    template = format.template
    begin = template.begin.replace("{name}", function.name)
    head = f" {rule}_number ".join(tokens.to_lark(part) for part in begin.split("{number}"))
    rules = []
    if "{number}" in begin:
        rules.append(f"{rule}_number: /[0-9]{{1,3}}/")
    if template.argument and format.tags is not None:
        tagged = TaggedCall(rule, format, function, tokens).rules()
        return [f"{rule}: {head} {rule}_more", *rules, *tagged]
    if format.style is not JSON_STYLE:
        rules += ListedCall(rule, format, function, tokens).rules()
    elif isinstance(function, TextFunction):
        opening, closing = json.dumps('{"input": "'), json.dumps('"}')
        text = input_lark(function.input_grammar, quoted=True)
        rules.append(f"{rule}_arguments: {opening} {text} {closing}")
    else:
        parameters = function.parameters or {"type": "object", "properties": {}}
        rules.append(f"{rule}_arguments: {function_json(parameters, function)}")
    end = tokens.to_lark(template.end)
    return [f"{rule}: {head} {rule}_arguments {end}".rstrip(), *rules]
