"""What a Responses request asks for, as a `ChatRequest`."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from msgspec.structs import replace

from router.errors import InvalidRequest, NotFound, NotSupported
from router.responses.schemas import (
    FunctionTool,
    InputItem,
    ItemContentPart,
    ResponsesRequest,
    ResponsesToolChoice,
    TextFormat,
)
from router.schemas.conversation import (
    AllowedTools,
    ChatMessage,
    FunctionCall,
    FunctionDefinition,
    FunctionName,
    NamedTool,
    Tool,
    ToolCall,
    ToolChoice,
    ToolMode,
)
from router.schemas.requests import ChatRequest, sampling_fields, validated
from router.schemas.structured import JsonSchemaFormat, ResponseFormat

_Value = TypeVar("_Value")

_PARAGRAPH = "\n\n"
_ID_PREFIXES = {"reasoning": "rs_", "function_call": "fc_", "function_call_output": "fco_"}


def chat_request(body: ResponsesRequest, items: Sequence[InputItem]) -> ChatRequest:
    """A request for the answer to ``items``, which `resolve_input` made. Raises
    `InvalidRequest`."""
    fields = sampling_fields(body)
    asked = body.text.format if body.text else None
    if asked is not None:
        fields["response_format"] = _response_format(asked)
    return validated(
        ChatRequest(
            **fields,
            messages=_messages(items, body.instructions),
            max_tokens=body.max_output_tokens,
            tools=[_tool(tool, index) for index, tool in enumerate(body.tools or ())],
            tool_choice=_tool_choice(body.tool_choice),
            parallel_tool_calls=body.parallel_tool_calls,
            reasoning_effort=body.reasoning.effort if body.reasoning else None,
            logprobs=body.wants_logprobs or None,
            top_logprobs=body.top_logprobs,
            chat_template_kwargs=body.chat_template_kwargs,
        )
    )


def _response_format(asked: TextFormat) -> ResponseFormat:
    if asked.type != "json_schema":
        return ResponseFormat(type=asked.type)
    assert asked.schema is not None  # `ResponsesRequest.check` has seen it
    return ResponseFormat(
        type="json_schema",
        json_schema=JsonSchemaFormat(name=asked.name, schema=asked.schema, strict=asked.strict),
    )


def _tool(tool: FunctionTool, index: int) -> Tool:
    if tool.type != "function":
        raise NotSupported(
            f"'tools[{index}]': tools of type '{tool.type}' are not supported here; functions are.",
            param=f"tools[{index}].type",
        )
    if tool.name is None:
        where = f"tools[{index}].name"
        raise InvalidRequest(f"'{where}' is missing.", param=where)
    function = FunctionDefinition(
        name=tool.name,
        description=tool.description,
        parameters=tool.parameters,
        strict=tool.strict,
    )
    return Tool(function=function)


def _tool_choice(choice: ToolMode | ResponsesToolChoice | None) -> ToolMode | ToolChoice | None:
    if not isinstance(choice, ResponsesToolChoice):
        return choice
    match choice:
        case ResponsesToolChoice(type="function", name=str(name)):
            return ToolChoice(type="function", function=FunctionName(name))
        case ResponsesToolChoice(type="allowed_tools", mode=mode, tools=list(tools)) if tools:
            named = [tool.name for tool in tools if tool.type == "function" and tool.name]
            if len(named) == len(tools):
                allowed = [NamedTool(function=FunctionName(name)) for name in named]
                return ToolChoice(
                    type="allowed_tools",
                    allowed_tools=AllowedTools(mode=mode or "auto", tools=allowed),
                )
    raise NotSupported(
        f"A 'tool_choice' of type '{choice.type}' like this is not supported: it takes the name"
        " of a function, or 'allowed_tools' that are functions.",
        param="tool_choice",
    )


# -- items ---------------------------------------------------------------------


def resolve_input(
    given: str | Sequence[InputItem], find: Callable[[str], InputItem | None]
) -> list[InputItem]:
    """The items of an input, each whole and with a type and an id; ``find`` gives those that
    are only referred to. Raises `InvalidRequest` that names what is wrong, or not supported."""
    if isinstance(given, str):
        given = [InputItem(role="user", content=given)]
    return [_resolve(item, f"input[{index}]", find) for index, item in enumerate(given)]


def _resolve(item: InputItem, where: str, find: Callable[[str], InputItem | None]) -> InputItem:
    kind = item.type or ("message" if item.role is not None else "item_reference")
    match kind:
        case "message":
            role = _required(item.role, where, "role")
            text = "output_text" if role == "assistant" else "input_text"
            content = item.content
            if content is None:
                raise _missing(where, "content")
            parts = (
                [ItemContentPart(type=text, text=content)] if isinstance(content, str) else content
            )
            _check_text(parts, f"{where}.content")
            item = replace(item, content=parts, status=item.status or "completed")
        case "function_call":
            for name in ("call_id", "name", "arguments"):
                _required(getattr(item, name), where, name)
        case "function_call_output":
            _required(item.call_id, where, "call_id")
            output = _required(item.output, where, "output")
            if isinstance(output, dict):
                place = f"{where}.output"
                raise InvalidRequest(f"'{place}' must be text or a list of parts.", param=place)
            if isinstance(output, list):
                _check_text(output, f"{where}.output")
        case "reasoning":
            if isinstance(item.content, list):
                _check_text(item.content, f"{where}.content")
        case "item_reference":
            item_id = _required(item.id, where, "id")
            found = find(item_id)
            if found is None:
                raise NotFound(
                    f"'{where}': there is no item '{item_id}'. Items are kept in memory with the"
                    " responses they belong to, and not for ever.",
                    param=f"{where}.id",
                    code="item_not_found",
                )
            return found
        case _:
            raise NotSupported(
                f"'{where}': items of type '{kind}' are not supported here.",
                param=f"{where}.type",
            )
    prefix = _ID_PREFIXES.get(kind, "msg_")
    return replace(item, type=kind, id=item.id or prefix + uuid.uuid4().hex)


def _check_text(parts: Sequence[ItemContentPart], where: str) -> None:
    for index, part in enumerate(parts):
        place = f"{where}[{index}]"
        name = "refusal" if part.type == "refusal" else "text"
        if part.type not in ("input_text", "output_text", "text", "reasoning_text", "refusal"):
            raise InvalidRequest(
                f"'{place}': content of type '{part.type}' is not supported here; this server"
                " takes text.",
                param=f"{place}.type",
                code="unsupported_content",
            )
        _required(getattr(part, name), place, name)


def _required(value: _Value | None, place: str, name: str) -> _Value:
    if value is None:
        raise _missing(place, name)
    return value


def _missing(place: str, name: str) -> InvalidRequest:
    return InvalidRequest(f"'{place}.{name}' is missing.", param=f"{place}.{name}")


# -- messages ------------------------------------------------------------------


def _messages(items: Sequence[InputItem], instructions: str | None) -> list[ChatMessage]:
    """Whatever an assistant said in a row is one message: reasoning, text and calls. So are
    the instructions and what the system says before anybody else."""
    found: list[ChatMessage] = []
    orders = [instructions] if instructions else []
    names: dict[str | None, str | None] = {}
    said: list[InputItem] = []
    for item in items:
        names[item.call_id] = item.name or names.get(item.call_id)
        if item.role in ("system", "developer") and not found and not said:
            orders.append(_text(item.content))
            continue
        if item.type in ("reasoning", "function_call") or item.role == "assistant":
            said.append(item)
            continue
        found += _assistant(said)
        said = []
        if item.type == "function_call_output":
            assert not isinstance(item.output, dict)  # `resolve_input` has seen it
            found.append(
                ChatMessage(
                    "tool",
                    _text(item.output),
                    name=names[item.call_id],
                    tool_call_id=item.call_id,
                )
            )
        else:
            assert item.role is not None
            found.append(ChatMessage(item.role, _text(item.content)))
    found += _assistant(said)
    if orders:
        found.insert(0, ChatMessage("system", _PARAGRAPH.join(orders)))
    return found


def _assistant(said: Sequence[InputItem]) -> Iterable[ChatMessage]:
    if not said:
        return ()
    thoughts = [
        _text(item.content) or _text(item.summary, _PARAGRAPH)
        for item in said
        if item.type == "reasoning"
    ]
    calls = [
        ToolCall(FunctionCall(item.name or "", item.arguments), id=item.call_id)
        for item in said
        if item.type == "function_call"
    ]
    message = ChatMessage(
        "assistant",
        "".join(_text(item.content) for item in said if item.type == "message"),
        tool_calls=calls or None,
        reasoning_content=_PARAGRAPH.join(filter(None, thoughts)) or None,
    )
    return (message,)


def _text(content: str | Sequence[ItemContentPart] | None, between: str = "") -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return between.join(part.text or part.refusal or "" for part in content)
