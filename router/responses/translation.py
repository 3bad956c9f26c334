"""Responses requests as `ChatRequest`s."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Sequence

from msgspec.structs import replace

from router.api.translation import (
    PARAGRAPH_BREAK,
    assistant_message,
    required,
    unsupported_content,
    with_paths,
)
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

_ID_PREFIXES = {"reasoning": "rs_", "function_call": "fc_", "function_call_output": "fco_"}
_TEXT_TYPES = ("input_text", "output_text", "text", "reasoning_text", "refusal")


def chat_request(body: ResponsesRequest, items: Sequence[InputItem]) -> ChatRequest:
    """Return the chat request for ``body``, with the conversation ``items`` (`resolve_input`
    returned them). Raises `InvalidRequest` that names the field."""
    fields = sampling_fields(body)
    text_format = body.text.format if body.text else None
    if text_format is not None:
        fields["response_format"] = _response_format(text_format)
    return validated(
        ChatRequest(
            **fields,
            messages=_messages(items, body.instructions),
            max_tokens=body.max_output_tokens,
            tools=[_tool(tool, path) for path, tool in with_paths(body.tools or (), "tools")],
            tool_choice=_tool_choice(body.tool_choice),
            parallel_tool_calls=body.parallel_tool_calls,
            reasoning_effort=body.reasoning.effort if body.reasoning else None,
            logprobs=body.wants_logprobs or None,
            top_logprobs=body.top_logprobs,
            chat_template_kwargs=body.chat_template_kwargs,
        )
    )


def _response_format(text_format: TextFormat) -> ResponseFormat:
    if text_format.type != "json_schema":
        return ResponseFormat(type=text_format.type)
    assert text_format.schema is not None  # `ResponsesRequest.check` refuses it
    return ResponseFormat(
        type="json_schema",
        json_schema=JsonSchemaFormat(
            name=text_format.name, schema=text_format.schema, strict=text_format.strict
        ),
    )


def _tool(tool: FunctionTool, path: str) -> Tool:
    if tool.type != "function":
        raise NotSupported(
            f"'{path}': tools of type '{tool.type}' are not supported here; functions are.",
            param=f"{path}.type",
        )
    return Tool(
        function=FunctionDefinition(
            name=required(tool.name, path, "name"),
            description=tool.description,
            parameters=tool.parameters,
            strict=tool.strict,
        )
    )


def _tool_choice(choice: ToolMode | ResponsesToolChoice | None) -> ToolMode | ToolChoice | None:
    if not isinstance(choice, ResponsesToolChoice):
        return choice
    match choice:
        case ResponsesToolChoice(type="function", name=str(name)):
            return ToolChoice(type="function", function=FunctionName(name))
        case ResponsesToolChoice(type="allowed_tools", mode=mode, tools=list(tools)) if tools:
            names = [tool.name for tool in tools if tool.type == "function" and tool.name]
            if len(names) == len(tools):
                named = [NamedTool(function=FunctionName(name)) for name in names]
                allowed = AllowedTools(mode=mode or "auto", tools=named)
                return ToolChoice(type="allowed_tools", allowed_tools=allowed)
    raise NotSupported(
        f"A 'tool_choice' of type '{choice.type}' like this is not supported: it takes the name"
        " of a function, or 'allowed_tools' that are functions.",
        param="tool_choice",
    )


# -- messages ------------------------------------------------------------------


def _messages(items: Sequence[InputItem], instructions: str | None) -> list[ChatMessage]:
    """Return the messages of a conversation. One holds the instructions and the system's
    messages before any other. One holds consecutive items of the assistant: reasoning, text
    and calls."""
    messages: list[ChatMessage] = []
    system_texts = [instructions] if instructions else []
    tool_names: dict[str | None, str | None] = {}  # by the id of a call
    turn: list[InputItem] = []  # consecutive items of the assistant
    for item in items:
        tool_names[item.call_id] = item.name or tool_names.get(item.call_id)
        if item.role in ("system", "developer") and not messages and not turn:
            system_texts.append(_text(item.content))
        elif item.type in ("reasoning", "function_call") or item.role == "assistant":
            turn.append(item)
        else:
            messages += _assistant_messages(turn)
            turn = []
            messages.append(_message(item, tool_names))
    messages += _assistant_messages(turn)
    if system_texts:
        messages.insert(0, ChatMessage("system", PARAGRAPH_BREAK.join(system_texts)))
    return messages


def _assistant_messages(turn: Sequence[InputItem]) -> Iterable[ChatMessage]:
    """Return one message, or none if ``turn`` is empty."""
    if not turn:
        return ()
    texts = [_text(item.content) for item in turn if item.type == "message"]
    thoughts = [
        _text(item.content) or _text(item.summary, PARAGRAPH_BREAK)
        for item in turn
        if item.type == "reasoning"
    ]
    calls = [
        ToolCall(FunctionCall(item.name or "", item.arguments), id=item.call_id)
        for item in turn
        if item.type == "function_call"
    ]
    return (assistant_message(texts, thoughts, calls),)


def _message(item: InputItem, tool_names: dict[str | None, str | None]) -> ChatMessage:
    if item.type == "function_call_output":
        assert not isinstance(item.output, dict)  # `resolve_input` refuses it
        name, result = tool_names[item.call_id], _text(item.output)
        return ChatMessage("tool", result, name=name, tool_call_id=item.call_id)
    assert item.role is not None
    return ChatMessage(item.role, _text(item.content))


def _text(content: str | Sequence[ItemContentPart] | None, separator: str = "") -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return separator.join(part.text or part.refusal or "" for part in content)


# -- input items ---------------------------------------------------------------


def resolve_input(
    given: str | Sequence[InputItem], find_item: Callable[[str], InputItem | None]
) -> list[InputItem]:
    """Return the items of an input, each complete and with a type and an id. A reference is
    replaced by what ``find_item`` returns for its id. Raises `NotFound` if that is None, and
    `InvalidRequest`; both name the field."""
    if isinstance(given, str):
        given = [InputItem(role="user", content=given)]
    return [_resolve(item, path, find_item) for path, item in with_paths(given, "input")]


def _resolve(item: InputItem, path: str, find_item: Callable[[str], InputItem | None]) -> InputItem:
    item_type = item.type or ("message" if item.role is not None else "item_reference")
    match item_type:
        case "message":
            role = required(item.role, path, "role")
            parts = item.content
            if isinstance(parts, str):
                text_type = "output_text" if role == "assistant" else "input_text"
                parts = [ItemContentPart(type=text_type, text=parts)]
            _check_text(required(parts, path, "content"), f"{path}.content")
            item = replace(item, content=parts, status=item.status or "completed")
        case "function_call":
            for name in ("call_id", "name", "arguments"):
                required(getattr(item, name), path, name)
        case "function_call_output":
            required(item.call_id, path, "call_id")
            output = required(item.output, path, "output")
            path += ".output"
            if isinstance(output, dict):
                raise InvalidRequest(f"'{path}' must be text or a list of parts.", param=path)
            if isinstance(output, list):
                _check_text(output, path)
        case "reasoning":
            if isinstance(item.content, list):
                _check_text(item.content, f"{path}.content")
        case "item_reference":
            return _referenced(required(item.id, path, "id"), path, find_item)
        case _:
            raise NotSupported(
                f"'{path}': items of type '{item_type}' are not supported here.",
                param=f"{path}.type",
            )
    prefix = _ID_PREFIXES.get(item_type, "msg_")
    return replace(item, type=item_type, id=item.id or prefix + uuid.uuid4().hex)


def _referenced(item_id: str, path: str, find_item: Callable[[str], InputItem | None]) -> InputItem:
    item = find_item(item_id)
    if item is None:
        raise NotFound(
            f"'{path}': there is no item '{item_id}'. Items are kept in memory with the"
            " responses they belong to, and not for ever.",
            param=f"{path}.id",
            code="item_not_found",
        )
    return item


def _check_text(parts: Sequence[ItemContentPart], path: str) -> None:
    for part_path, part in with_paths(parts, path):
        if part.type not in _TEXT_TYPES:
            raise unsupported_content(part.type, part_path)
        name = "refusal" if part.type == "refusal" else "text"
        required(getattr(part, name), part_path, name)
