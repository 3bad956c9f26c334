"""What a Messages request asks for, as a `ChatRequest`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from router.anthropic.schemas import (
    AnthropicTool,
    AnthropicToolChoice,
    ContentBlockParam,
    CountTokensRequest,
    MessageParam,
    MessagesRequest,
    OutputFormat,
    ThinkingConfig,
)
from router.errors import InvalidRequest, NotSupported
from router.schemas.conversation import (
    ChatMessage,
    FunctionCall,
    FunctionDefinition,
    FunctionName,
    Tool,
    ToolCall,
    ToolChoice,
    ToolMode,
)
from router.schemas.requests import ChatRequest, sampling_fields, validated
from router.schemas.structured import JsonSchemaFormat, ResponseFormat

_PARAGRAPH = "\n\n"


def chat_request(body: CountTokensRequest) -> ChatRequest:
    """Raises `InvalidRequest` that names what is wrong, or not supported, by its place."""
    own = body if isinstance(body, MessagesRequest) else None
    choice = body.tool_choice
    config = body.output_config
    fields = sampling_fields(body)
    messages = _messages(body)
    asked = body.output_format or (config.format if config else None)
    if asked is not None:
        fields["response_format"] = _response_format(asked)
    return validated(
        ChatRequest(
            **fields,
            messages=messages,
            continue_final_message=messages[-1].role == "assistant",
            max_tokens=own.max_tokens if own else None,
            stop=own.stop_sequences if own else None,
            tools=[_tool(tool, index) for index, tool in enumerate(body.tools or ())],
            tool_choice=_tool_choice(choice) if choice else None,
            parallel_tool_calls=(False if choice and choice.disable_parallel_tool_use else None),
            reasoning_effort=config.effort if config else None,
            chat_template_kwargs={
                **(_template_args(body.thinking) if body.thinking else {}),
                **(body.chat_template_kwargs or {}),
            },
        )
    )


def _template_args(thinking: ThinkingConfig) -> dict[str, Any]:
    args: dict[str, Any] = {"enable_thinking": thinking.type != "disabled"}
    if thinking.budget_tokens is not None:
        args["thinking_budget"] = thinking.budget_tokens
    return args


def _tool(tool: AnthropicTool, index: int) -> Tool:
    if tool.type not in (None, "custom"):
        raise NotSupported(
            f"'tools[{index}]': tools of type '{tool.type}' are Anthropic's own and not supported"
            " here; give a name and an 'input_schema'.",
            param=f"tools[{index}].type",
        )
    if tool.input_schema is None:
        where = f"tools[{index}].input_schema"
        raise InvalidRequest(f"'{where}' is missing.", param=where)
    function = FunctionDefinition(
        name=tool.name,
        description=tool.description,
        parameters=tool.input_schema,
        strict=tool.strict,
    )
    return Tool(function=function)


def _tool_choice(choice: AnthropicToolChoice) -> ToolMode | ToolChoice:
    match choice.type:
        case "auto":
            return "auto"
        case "none":
            return "none"
        case "any":
            return "required"
        case "tool":
            if choice.name is None:
                raise InvalidRequest(
                    "'tool_choice' of type 'tool' needs a 'name'.", param="tool_choice.name"
                )
            return ToolChoice(type="function", function=FunctionName(choice.name))


def _response_format(asked: OutputFormat) -> ResponseFormat:
    return ResponseFormat(type="json_schema", json_schema=JsonSchemaFormat(schema=asked.schema))


# -- messages ------------------------------------------------------------------


def _messages(body: CountTokensRequest) -> list[ChatMessage]:
    found: list[ChatMessage] = []
    if body.system:
        found.append(ChatMessage("system", _text(body.system, "system", _PARAGRAPH)))
    names: dict[str, str] = {}
    for index, turn in enumerate(body.messages):
        where = f"messages[{index}]"
        match turn.role:
            case "assistant":
                message = _assistant(turn, where)
                names |= {call.id or "": call.function.name for call in message.tool_calls or ()}
                found.append(message)
            case "user":
                found += _user(turn, where, names)
            case "system":
                found.append(ChatMessage("system", _text(turn.content, where, _PARAGRAPH)))
    if found[-1].tool_calls:
        where = f"messages[{len(body.messages) - 1}]"
        raise InvalidRequest(f"The calls in '{where}' have no results.", param=where)
    return found


def _assistant(turn: MessageParam, where: str) -> ChatMessage:
    if isinstance(turn.content, str):
        return ChatMessage("assistant", turn.content)
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for place, block in _with_places(turn.content, f"{where}.content"):
        match block.type:
            case "text":
                texts.append(_required(block.text, place, "text"))
            case "thinking":
                thoughts.append(_required(block.thinking, place, "thinking"))
            case "redacted_thinking":
                pass  # only its author could read it
            case "tool_use":
                name = _required(block.name, place, "name")
                call = FunctionCall(name, block.input or {})
                calls.append(ToolCall(call, id=_required(block.id, place, "id")))
            case _:
                raise _unsupported(block, place)
    return ChatMessage(
        "assistant",
        "".join(texts),
        tool_calls=calls or None,
        reasoning_content=_PARAGRAPH.join(filter(None, thoughts)) or None,
    )


def _user(turn: MessageParam, where: str, names: dict[str, str]) -> Iterator[ChatMessage]:
    """Results of tools are messages of their own."""
    if isinstance(turn.content, str):
        yield ChatMessage("user", turn.content)
        return
    texts: list[str] = []
    for place, block in _with_places(turn.content, f"{where}.content"):
        if block.type != "tool_result":
            texts.append(_text_of(block, place))
            continue
        if texts:
            yield ChatMessage("user", _PARAGRAPH.join(texts))
            texts = []
        tool_use_id = _required(block.tool_use_id, place, "tool_use_id")
        yield ChatMessage(
            "tool",
            _result(block, f"{place}.content"),
            name=names.get(tool_use_id),
            tool_call_id=tool_use_id,
        )
    if texts or not turn.content:
        yield ChatMessage("user", _PARAGRAPH.join(texts))


def _result(block: ContentBlockParam, where: str) -> str:
    content = block.content
    if isinstance(content, dict):
        raise InvalidRequest(f"'{where}' must be text or a list of blocks.", param=where)
    text = _text(content, where, "\n") if content else ""
    return f"Error: {text}" if block.is_error else text


def _text(content: str | Sequence[ContentBlockParam], where: str, between: str) -> str:
    if isinstance(content, str):
        return content
    return between.join(_text_of(block, place) for place, block in _with_places(content, where))


def _text_of(block: ContentBlockParam, place: str) -> str:
    if block.type != "text":
        raise _unsupported(block, place)
    return _required(block.text, place, "text")


def _with_places(
    blocks: Sequence[ContentBlockParam], where: str
) -> Iterator[tuple[str, ContentBlockParam]]:
    for index, block in enumerate(blocks):
        yield f"{where}[{index}]", block


def _required(value: str | None, place: str, name: str) -> str:
    if value is None:
        raise InvalidRequest(f"'{place}.{name}' is missing.", param=f"{place}.{name}")
    return value


def _unsupported(block: ContentBlockParam, place: str) -> InvalidRequest:
    return InvalidRequest(
        f"'{place}': content of type '{block.type}' is not supported here; this server takes text.",
        param=f"{place}.type",
        code="unsupported_content",
    )
