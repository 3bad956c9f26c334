"""The tools of a Responses request as functions, and the mapping back from their names.

A model is only given functions. A tool of another type that the client runs becomes a function with
a fixed schema, and its calls become items of the tool's own type (`router.responses.calls`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from router.api.translation import required, with_paths
from router.errors import InvalidRequest, NotSupported
from router.responses.schemas import InputItem, ResponsesTool, ResponsesToolChoice, ToolFormat
from router.schemas.conversation import (
    MAX_TOOLS,
    AllowedTools,
    FunctionDefinition,
    FunctionName,
    NamedTool,
    TextFunction,
    ToolChoice,
    ToolMode,
)
from router.schemas.structured import MAX_INPUT_GRAMMAR_BYTES, check_grammar_size
from shared.wire import Grammar

_MAX_NAME_CHARS = 128
_TEXT = {"type": "string"}
_COUNT = {"type": "integer", "minimum": 1}


def _object(required_names: Sequence[str], **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required_names),
        "additionalProperties": False,
    }


_FIXED = {
    "local_shell": (
        "Run a command on the user's machine.",
        _object(
            ["command"],
            command={"type": "array", "items": _TEXT, "minItems": 1},
            working_directory=_TEXT,
            timeout_ms=_COUNT,
        ),
    ),
    "shell": (
        "Run shell commands on the user's machine.",
        _object(
            ["commands"],
            commands={"type": "array", "items": _TEXT, "minItems": 1},
            timeout_ms=_COUNT,
            max_output_length=_COUNT,
        ),
    ),
    "apply_patch": (
        "Create, update or delete a file. A diff has the lines of a unified diff: lines that "
        "begin with '+' are added, with '-' removed, with a space kept, and '@@' begins a hunk.",
        _object(
            ["type", "path"],
            type={"enum": ["create_file", "update_file", "delete_file"]},
            path=_TEXT,
            diff=_TEXT,
        ),
    ),
}
"""Description and parameters of tools that define no name and schema themselves."""
_SEARCH = (
    "Search the tools that are not listed here. Those found can be called from then on.",
    _object(["query"], query=_TEXT),
)
"""The same for a tool search that the client runs, where it gives none."""
_CHOSEN = (*_FIXED, "tool_search", "function", "custom")


@dataclass(frozen=True)
class ClientTool:
    """A tool that the client runs, and the function that represents it."""

    type: str
    name: str
    """The client's name for it, within its namespace."""
    namespace: str | None
    function: FunctionDefinition
    is_deferred: bool = False
    """Whether only the conversation shows it, where it becomes available."""


def client_tools(tools: Sequence[ResponsesTool]) -> list[ClientTool]:
    """Return the tools that the client runs, without others. Raises `InvalidRequest` with the name
    of the field."""
    found = list(itertools.islice(_client_tools(tools, "tools", None), MAX_TOOLS + 1))
    if len(found) > MAX_TOOLS:
        raise InvalidRequest(f"There are more than {MAX_TOOLS} tools.", param="tools")
    if any(tool.searches_tools for tool in tools):
        return found
    return [replace(tool, is_deferred=False) for tool in found]


def found_tools(item: InputItem, path: str) -> list[ClientTool]:
    """Return the tools that ``item`` makes available. Raises `InvalidRequest`."""
    try:
        tools = msgspec.convert(item.tools or [], list[ResponsesTool])
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"'{path}.tools': {error}", param=f"{path}.tools") from None
    found = itertools.islice(_client_tools(tools, f"{path}.tools", None), MAX_TOOLS)
    return [replace(tool, is_deferred=True) for tool in found]


def function_name(name: str, namespace: str | None) -> str:
    """Return the name of the function that represents a tool."""
    if not namespace:
        return name
    return f"{namespace.removesuffix('__')}__{name}"


def tool_choice(choice: ToolMode | ResponsesToolChoice | None) -> ToolMode | ToolChoice | None:
    """Return ``choice`` in the chat API's format. Raises `NotSupported`."""
    if not isinstance(choice, ResponsesToolChoice):
        return choice
    if choice.type == "allowed_tools" and choice.tools:
        names = [_chosen(tool) for tool in choice.tools if tool.type in _CHOSEN]
        known = [NamedTool(function=FunctionName(name)) for name in names if name is not None]
        if known and len(known) == len(names):
            allowed = AllowedTools(mode=choice.mode or "auto", tools=known)
            return ToolChoice(type="allowed_tools", allowed_tools=allowed)
    elif (name := _chosen(choice)) is not None:
        return ToolChoice(type="function", function=FunctionName(name))
    raise NotSupported(
        f"This 'tool_choice' of type '{choice.type}' is not supported. It must name a tool that "
        "the client runs, or be 'allowed_tools' with only such tools.",
        param="tool_choice",
    )


def _chosen(choice: ResponsesToolChoice) -> str | None:
    if choice.type in (*_FIXED, "tool_search"):
        return choice.type
    if choice.type in ("function", "custom") and choice.name:
        return function_name(choice.name, choice.namespace)
    return None


def _client_tools(
    tools: Sequence[ResponsesTool], path: str, namespace: ResponsesTool | None
) -> Iterator[ClientTool]:
    for tool_path, tool in with_paths(tools, path):
        if tool.type == "namespace" and namespace is None:
            required(tool.name or None, tool_path, "name")
            inner = required(tool.tools or None, tool_path, "tools")
            yield from _client_tools(inner, f"{tool_path}.tools", tool)
        elif tool.type == "namespace":
            raise NotSupported(
                f"'{tool_path}': a namespace cannot contain another.", param=f"{tool_path}.type"
            )
        elif tool.type in _FIXED:
            description, parameters = _FIXED[tool.type]
            function = FunctionDefinition(
                name=tool.type, description=description, parameters=parameters, strict=True
            )
            yield ClientTool(tool.type, tool.type, None, function)
        elif tool.searches_tools:
            function = FunctionDefinition(
                name=tool.type,
                description=tool.description or _SEARCH[0],
                parameters=tool.parameters or _SEARCH[1],
            )
            yield ClientTool(tool.type, tool.type, None, function)
        elif tool.type in ("function", "custom"):
            yield _named_tool(tool, tool_path, namespace)


def _named_tool(tool: ResponsesTool, path: str, namespace: ResponsesTool | None) -> ClientTool:
    own_name = required(tool.name or None, path, "name")
    space = namespace.name or None if namespace else None
    name = function_name(own_name, space)
    if len(name) > _MAX_NAME_CHARS:
        raise InvalidRequest(
            f"'{path}.name' has more than {_MAX_NAME_CHARS} characters including its namespace.",
            param=f"{path}.name",
        )
    waits = True in (tool.defer_loading, namespace.defer_loading if namespace else None)
    return ClientTool(tool.type, own_name, space, _function(tool, name, path), waits)


def _function(tool: ResponsesTool, name: str, path: str) -> FunctionDefinition:
    description = tool.description or None
    if tool.type == "function":
        parameters, strict = tool.parameters or None, tool.strict or None
        return FunctionDefinition(
            name=name, description=description, parameters=parameters, strict=strict
        )
    parameters = _object(["input"], input=_TEXT)
    grammar = _input_grammar(tool.format, path) if tool.format else None
    if grammar is None:
        return FunctionDefinition(
            name=name, description=description, parameters=parameters, strict=True
        )
    kind = "Lark grammar" if grammar.kind == "lark" else "regular expression"
    # A model that has to guess the allowed input writes something else that the grammar allows.
    rule = f"The input matches this {kind}:\n{grammar.source}"
    return TextFunction(
        name=name,
        description=f"{description}\n\n{rule}" if description else rule,
        parameters=parameters,
        strict=True,
        input_grammar=grammar,
    )


def _input_grammar(format: ToolFormat, path: str) -> Grammar | None:
    """Return the grammar of a custom tool's input; None if any text is allowed."""
    match format:
        case ToolFormat(type="text"):
            return None
        case ToolFormat(syntax="lark" | "regex" as kind, definition=str(definition)):
            param = f"{path}.format.definition"
            check_grammar_size(len(definition.encode()), param, MAX_INPUT_GRAMMAR_BYTES)
            return Grammar(kind=kind, source=definition, param=param)
    raise InvalidRequest(
        f"'{path}.format' of type 'grammar' requires a 'syntax' and a 'definition'.",
        param=f"{path}.format",
    )
