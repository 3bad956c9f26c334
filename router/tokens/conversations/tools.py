"""Tools for templates that do not show those that they are given."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Literal

from router.schemas.conversation import PARAGRAPH_BREAK, Tool
from router.tokens.conversations.fitting import TemplateLimits, fitted
from router.tokens.parsing.calls import JSON, written_calls
from router.tokens.parsing.formats import CALL_FORMATS

_Json = dict[str, Any]
Applies = Callable[[list[_Json], list[_Json] | None, _Json], str]
"""Renders messages with tools and further arguments. May raise any exception."""
ToolsPlace = Literal["tools", "xml_tools", "system", "text"]
"""Where a template shows tools: the argument ``tools`` or, in SmolLM3's, ``xml_tools``; ``tools``
of the system message, in Phi-4-mini's; or nowhere, so that they become text of that message."""

_SYSTEM: _Json = {"role": "system", "content": "x"}


def tool_schema(tool: Tool) -> dict[str, Any]:
    """Return a tool in the format of transformers' ``get_json_schema``, which templates expect."""
    function = tool.function
    schema: dict[str, Any] = {"name": function.name}
    if function.description is not None:
        schema["description"] = function.description
    schema["parameters"] = function.parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": schema}


def tools_place(applies: Applies, tool: _Json, limits: TemplateLimits) -> ToolsPlace:
    """Return where a template shows tools, found by rendering short conversations with ``tool``.
    If it raises with tools, its message is for the client."""

    def shows(messages: list[_Json], tools: list[_Json] | None, args: _Json) -> bool:
        return tool["function"]["name"] in applies(fitted(messages, limits), tools, args)

    hello = {"role": "user", "content": "x"}
    try:
        if shows([hello], [tool], {}) or shows([_SYSTEM, hello], [tool], {}):
            return "tools"
    except Exception:  # a template is untrusted code
        return "tools"
    attempts: list[tuple[ToolsPlace, list[_Json], _Json]] = [
        ("xml_tools", [hello], {"xml_tools": _functions([tool])}),
        ("system", [{**_SYSTEM, "tools": _listed([tool])}, hello], {}),
    ]
    for place, messages, args in attempts:
        try:
            if shows(messages, None, args):
                return place
        except Exception:
            pass
    return "text"


def with_tools(
    messages: list[_Json],
    tools: Sequence[_Json],
    place: ToolsPlace,
    limits: TemplateLimits,
    call_syntax: str,
) -> tuple[list[_Json], _Json]:
    """Return ``messages``, which fit the template, and further arguments, so that the template
    shows ``tools``. This comes after control tokens of clients are broken up: a description has
    the model's call format."""
    if not tools or place == "tools":
        return messages, {}
    if place == "xml_tools":
        return messages, {"xml_tools": _functions(tools)}
    system, rest = _system(messages, limits)
    if place == "system":
        return [{**system, "tools": _listed(tools)}, *rest], {}
    description = _described(tools, call_syntax)
    content = _with_text(system["content"], description, first=system["role"] == "user")
    return [{**system, "content": content}, *rest], {}


def _system(messages: list[_Json], limits: TemplateLimits) -> tuple[_Json, list[_Json]]:
    """Return the message for text of the system's, which may be new, and those after it."""
    role = "user" if limits.system else "system"
    if messages and messages[0]["role"] == role:
        return messages[0], messages[1:]
    return fitted([{"role": role, "content": ""}], limits)[0], messages


def _functions(tools: Sequence[_Json]) -> list[_Json]:
    return [tool["function"] for tool in tools]


def _listed(tools: Sequence[_Json]) -> str:
    return json.dumps(_functions(tools), ensure_ascii=False)


def _described(tools: Sequence[_Json], call_syntax: str) -> str:
    """Return a description in the form that DeepSeek V3.1 was trained on."""
    lines = ["## Tools", "You have access to the following tools:", ""]
    for function in _functions(tools):
        parameters = json.dumps(function["parameters"], ensure_ascii=False)
        lines += [f"### {function['name']}", f"Description: {function.get('description', '')}", ""]
        lines += [f"Parameters: {parameters}", ""]
    format = CALL_FORMATS.get(call_syntax, JSON)
    arguments: Any = "tool_call_arguments"
    rule = "`tool_call_name` is the name of a tool, `tool_call_arguments` is JSON as it takes it."
    if format.template.argument:
        arguments = {"argument_name": "argument_value"}
        rule = (
            "`tool_call_name` is the name of a tool. Write the name and the value of each argument "
            "like `argument_name` and `argument_value`."
        )
    lines += ["To call a tool, write exactly in this format:"]
    lines += [written_calls(format, [{"name": "tool_call_name", "arguments": arguments}]), ""]
    if call_syntax == JSON.name:
        rule += " Write nothing else."  # plain JSON is only a call where an answer begins with it
    return "\n".join([*lines, rule])


def _with_text(content: str | list[_Json], text: str, *, first: bool) -> str | list[_Json]:
    """Return the ``content`` of a message with ``text``, which comes ``first`` or last."""
    if isinstance(content, str):
        return PARAGRAPH_BREAK.join(filter(None, (text, content) if first else (content, text)))
    if first:
        return [{"type": "text", "text": text + PARAGRAPH_BREAK}, *content]
    return [*content, {"type": "text", "text": PARAGRAPH_BREAK + text}]
