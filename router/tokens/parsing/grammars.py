"""Grammars that restrict answers to calls of given tools, in the model's own syntax.

The result is Lark in llguidance's dialect:
https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from router.schemas.conversation import FunctionDefinition, TextFunction
from router.tokens.parsing.calls import PLAIN_TEMPLATE, CallFormat
from router.tokens.parsing.formats import CALL_FORMATS, MessageFormat, ReasoningMarkers
from router.tokens.parsing.input_grammars import input_lark
from router.tokens.parsing.json_reader import JSON_STYLE
from router.tokens.parsing.lark_parts import ControlTokens, function_json
from router.tokens.parsing.listed_grammars import ListedCall, has_free_numbers
from router.tokens.parsing.tagged_grammars import TaggedCall

_MAX_CALLS = 16
_MAX_LISTED = 64
"""Max number of tools whose arguments in JSON are listed: that takes a kilobyte for each."""


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
    first_call: str = "",
) -> str:
    """Return the Lark grammar of answers that call ``functions``, once or, if ``parallel``, several
    times.

    Reasoning between ``think`` may come first. If calls are ``optional``, text may surround them or
    replace them, without what begins calls; the markers ``structure`` may occur in it.
    ``alternative`` is a rule for other answers; ``first_call`` may replace the text before the
    arguments of the first call.
    """
    template = format.template
    marker, opener = format.start, format.opener
    is_spelled = optional and not tokens.occur_in(marker)
    first = template.before + template.begin
    firsts = [first.removeprefix(marker)] if is_spelled else [first, first_call]
    start, rules = _calls(format, functions, tokens, parallel, firsts)
    if alternative is not None:
        rules.append(f"instead: {alternative}")
        start = f"({start} | instead)"
    if optional:
        rules.append(f"TEXT: {tokens.text_without(marker, at_line_start=opener)}")
        parts = [tokens.to_lark(each) for each in structure if tokens.occur_in(each)]
        rules.append(f"text: TEXT (({' | '.join(parts)}) TEXT)*" if parts else "text: TEXT")
        if not is_spelled:
            start = f"text ({start} text)?"
        else:
            # The text may include the start of a call, which is only recognized once it is
            # complete.
            rules.append(f"LEAD: {tokens.text_without(at_line_start=opener)}")
            rules.append(f"lead[suffix={json.dumps(marker)}]: LEAD")
            start = f"(text | lead {start} text?)"
    if think is not None:
        rules.append(f"THOUGHT: {tokens.text_without(think.end)}")
        rules.append(f"thought: {tokens.to_lark(think.start)} THOUGHT {tokens.to_lark(think.end)}")
        rules.append("SPACE: /[ \\n]{0,4}/")
        start = f"(thought SPACE)? {start}"
    return "\n".join([f"start: {start}", *rules])


def messages_grammar(
    messages: MessageFormat,
    format: CallFormat,
    functions: Sequence[FunctionDefinition],
    tokens: ControlTokens,
    *,
    parallel: bool,
) -> str:
    """Return the Lark grammar of answers in ``messages`` with any text, the last of which may call
    ``functions``."""
    first = format.template.before + format.template.begin
    firsts = [first, messages.first_call]
    start, rules = _calls(format, functions, tokens, parallel, firsts)
    headers = " | ".join(map(tokens.to_lark, messages.headers))
    return "\n".join(
        [
            f"start: (message gap)* (message | {start})",
            f"message: ({headers}) TEXT",
            f"TEXT: {tokens.text_without()}",
            f"gap: {tokens.to_lark(messages.reasoning.end)}",
            *rules,
        ]
    )


def _calls(
    format: CallFormat,
    functions: Sequence[FunctionDefinition],
    tokens: ControlTokens,
    parallel: bool,
    firsts: Sequence[str],
) -> tuple[str, list[str]]:
    """Return an expression for calls, and its rules. ``firsts`` are the texts before the arguments
    of the first one."""
    template = format.template
    bodies, rules = [], ["number: /[0-9]{1,3}/"] if "{number}" in template.begin else []
    for number, function in enumerate(functions):
        listed = len(functions) <= _MAX_LISTED and has_free_numbers(function)
        body, own = _arguments(f"call{number}", format, function, tokens, listed=listed)
        bodies.append(body)
        rules += own

    def any_call(begin: str) -> str:
        named = (begin.replace("{name}", function.name) for function in functions)
        heads = (" number ".join(map(tokens.to_lark, each.split("{number}"))) for each in named)
        return " | ".join(map(" ".join, zip(heads, bodies, strict=True)))

    rules.append(f"call: {any_call(template.begin)}")
    between, before, after = (
        tokens.to_lark(part) for part in (template.between, template.before, template.after)
    )
    usual = template.before + template.begin
    ways = [f"{before} call" if each == usual else any_call(each) for each in firsts if each]
    more = f" ({between} call){{0,{_MAX_CALLS - 1}}}" if parallel else ""
    return f"({' | '.join(ways)}){more} {after}".strip(), rules


def _arguments(
    rule: str,
    format: CallFormat,
    function: FunctionDefinition,
    tokens: ControlTokens,
    *,
    listed: bool,
) -> tuple[str, list[str]]:
    """Return an expression for a call of ``function`` after its name, and its rules, whose names
    begin with ``rule``. ``listed``: arguments in JSON have rules of their own."""
    template = format.template
    if template.argument and format.tags is not None:
        return f"{rule}_more", TaggedCall(rule, format, function, tokens).rules()
    if format.style is not JSON_STYLE or listed:
        rules = ListedCall(rule, format, function, tokens).rules()
    elif isinstance(function, TextFunction):
        opening, closing = json.dumps('{"input": "'), json.dumps('"}')
        text = input_lark(function.input_grammar, quoted=True)
        rules = [f"{rule}_arguments: {opening} {text} {closing}"]
    else:
        parameters = function.parameters or {"type": "object", "properties": {}}
        rules = [f"{rule}_arguments: {function_json(parameters, function)}"]
    return f"{rule}_arguments {tokens.to_lark(template.end)}".rstrip(), rules
