"""Translation of Messages requests to `ChatRequest`s."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from router.anthropic.schemas import (
    BLOCK_TYPES,
    AnthropicTool,
    AnthropicToolChoice,
    BlockSource,
    ContentBlockParam,
    CountTokensRequest,
    MessageParam,
    MessagesRequest,
    OutputFormat,
    ThinkingConfig,
)
from router.api.history import definitions, item_note
from router.api.translation import (
    assistant_message,
    content_note,
    joined_content,
    required,
    with_paths,
)
from router.errors import InvalidRequest
from router.schemas.body import validated
from router.schemas.conversation import (
    PARAGRAPH_BREAK,
    ChatMessage,
    ContentPart,
    FunctionCall,
    FunctionDefinition,
    FunctionName,
    LaterTool,
    Tool,
    ToolCall,
    ToolChoice,
    ToolMode,
    unsupported_content,
)
from router.schemas.images import SentImage
from router.schemas.requests import ChatRequest
from router.schemas.sampling import sampling_fields
from router.schemas.structured import JsonSchemaFormat, ResponseFormat


def chat_request(body: CountTokensRequest) -> ChatRequest:
    """Return the chat request for ``body``. Raises `InvalidRequest` with the name of the field."""
    full = body if isinstance(body, MessagesRequest) else None
    choice = body.tool_choice
    config = body.output_config
    fields = sampling_fields(body)
    tools = _tools(body.tools or ())
    messages = _messages(_with_references(body, tools))
    output_format = body.output_format or (config.format if config else None)
    if output_format is not None:
        fields["response_format"] = _response_format(output_format)
    return validated(
        ChatRequest(
            **fields,
            messages=messages,
            continue_final_message=messages[-1].role == "assistant",
            max_tokens=full.max_tokens if full else None,
            stop=full.stop_sequences if full else None,
            tools=tools,
            tool_choice=_tool_choice(choice) if choice else None,
            parallel_tool_calls=(False if choice and choice.disable_parallel_tool_use else None),
            reasoning_effort=config.effort if config else None,
            chat_template_kwargs={
                **(_template_args(body.thinking) if body.thinking else {}),
                **(body.chat_template_kwargs or {}),
            },
        )
    )


def with_notes(body: CountTokensRequest) -> CountTokensRequest:
    """Return ``body`` with a note in place of each unsupported block, except images: whether these
    are supported depends on the model."""
    messages = [
        replace(param, content=_noted(param.content, images=param.role == "user"))
        for param in body.messages
    ]
    return replace(body, messages=messages, system=_noted(body.system, images=False))


def _noted(content: Any, *, images: bool, depth: int = 2) -> Any:
    """Return ``content`` with notes; ``images`` are kept if allowed. Only ``depth`` levels are
    searched, those of a message and a tool result: the translation refuses deeper blocks."""
    if not isinstance(content, list) or not depth:
        return content
    return [
        replace(block, content=_noted(block.content, images=images, depth=depth - 1))
        if _is_supported(block, images=images)
        else ContentBlockParam(type="text", text=content_note(block.type))
        for block in content
    ]


def _is_supported(block: ContentBlockParam, *, images: bool) -> bool:
    source = block.source
    match block.type:
        case "image":
            return images and source is not None
        case "document":
            is_text = isinstance(source, BlockSource) and source.type in ("text", "content")
            return images and is_text
    return block.is_foreign or block.type in BLOCK_TYPES


def _response_format(output_format: OutputFormat) -> ResponseFormat:
    schema = JsonSchemaFormat(schema=output_format.schema)
    return ResponseFormat(type="json_schema", json_schema=schema)


def _tools(tools: Sequence[AnthropicTool]) -> list[Tool]:
    """Return the client's ``tools``. Raises `InvalidRequest` with the name of the field."""
    may_wait = any(tool.searches_tools for tool in tools)
    return [
        (LaterTool if may_wait and tool.defer_loading else Tool)(
            function=FunctionDefinition(
                name=required(tool.name, path, "name"),
                description=tool.description,
                parameters=required(tool.input_schema, path, "input_schema"),
                strict=tool.strict,
            )
        )
        for path, tool in with_paths(tools, "tools")
        if not tool.is_anthropics
    ]


def _with_references(body: CountTokensRequest, tools: Sequence[Tool]) -> CountTokensRequest:
    """Return ``body`` with the tool itself where a deferred tool is first referred to."""
    later = {tool.function.name: tool for tool in tools if isinstance(tool, LaterTool)}

    def shown(block: ContentBlockParam) -> ContentBlockParam:
        if block.type == "tool_result" and isinstance(block.content, list):
            return replace(block, content=[shown(each) for each in block.content])
        if block.type != "tool_reference":
            return block
        tool = later.pop(block.tool_name or "", None)
        named = f"The tool '{block.tool_name}' is available."
        return ContentBlockParam(type="text", text=definitions([tool]) if tool else named)

    return replace(
        body,
        messages=[
            replace(each, content=[shown(block) for block in each.content])
            if isinstance(each.content, list)
            else each
            for each in body.messages
        ],
    )


def _tool_choice(choice: AnthropicToolChoice) -> ToolMode | ToolChoice:
    match choice.type:
        case "any":
            return "required"
        case "tool":
            if choice.name is None:
                raise InvalidRequest(
                    "'tool_choice' of type 'tool' requires a 'name'.", param="tool_choice.name"
                )
            return ToolChoice(type="function", function=FunctionName(choice.name))
        case mode:
            return mode


def _template_args(thinking: ThinkingConfig) -> dict[str, Any]:
    args: dict[str, Any] = {"enable_thinking": thinking.type != "disabled"}
    if thinking.budget_tokens is not None:
        args["thinking_budget"] = thinking.budget_tokens
    return args


# -- messages ------------------------------------------------------------------


def _messages(body: CountTokensRequest) -> list[ChatMessage]:
    messages: list[ChatMessage] = []
    if body.system:
        messages.append(ChatMessage("system", _system_text(body.system)))
    tool_names: dict[str, str] = {}  # keyed by the id of the call
    for path, param in with_paths(body.messages, "messages"):
        match param.role:
            case "assistant":
                message = _assistant_message(param, path)
                calls = message.tool_calls or ()
                tool_names |= {call.id or "": call.function.name for call in calls}
                messages.append(message)
            case "user":
                messages += _user_messages(param, path, tool_names)
            case "system":
                text = _text(param.content, f"{path}.content", PARAGRAPH_BREAK)
                messages.append(ChatMessage("system", text))
    if messages[-1].tool_calls:
        raise InvalidRequest(f"The tool calls in '{path}' have no results.", param=path)
    return messages


def _system_text(system: str | Sequence[ContentBlockParam]) -> str:
    if isinstance(system, str):
        return system
    blocks = with_paths(system, "system")
    return PARAGRAPH_BREAK.join(_block_text(block, path) for path, block in blocks)


def _assistant_message(param: MessageParam, path: str) -> ChatMessage:
    if isinstance(param.content, str):
        return ChatMessage("assistant", param.content)
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for block_path, block in with_paths(param.content, f"{path}.content"):
        match block.type:
            case "text":
                texts.append(required(block.text, block_path, "text"))
            case "thinking":
                thoughts.append(required(block.thinking, block_path, "thinking"))
            case "redacted_thinking":
                pass  # encrypted: only Anthropic can read it
            case "tool_use":
                call = FunctionCall(required(block.name, block_path, "name"), block.input or {})
                calls.append(ToolCall(call, id=required(block.id, block_path, "id")))
            case _:
                texts.append(f"\n{_block_text(block, block_path)}\n")
    return assistant_message(texts, thoughts, calls)


def _user_messages(
    param: MessageParam, path: str, tool_names: dict[str, str]
) -> Iterator[ChatMessage]:
    """Yield a message for each tool result and for the text between them."""
    if isinstance(param.content, str):
        yield ChatMessage("user", param.content)
        return
    parts: list[str | SentImage] = []
    for block_path, block in with_paths(param.content, f"{path}.content"):
        if block.type != "tool_result":
            parts += _block_parts(block, block_path)
            continue
        if parts:
            yield ChatMessage("user", joined_content(parts, PARAGRAPH_BREAK))
            parts = []
        call_id = required(block.tool_use_id, block_path, "tool_use_id")
        result = _result(block, f"{block_path}.content")
        yield ChatMessage("tool", result, name=tool_names.get(call_id), tool_call_id=call_id)
    if parts or not param.content:
        yield ChatMessage("user", joined_content(parts, PARAGRAPH_BREAK))


def _result(block: ContentBlockParam, path: str) -> str | list[ContentPart]:
    content = block.content
    if isinstance(content, dict):
        raise InvalidRequest(f"'{path}' must be text or a list of blocks.", param=path)
    found = joined_content(_parts(content or "", path), "\n")
    if not block.is_error:
        return found
    return f"Error: {found}" if isinstance(found, str) else [ContentPart("text", "Error: "), *found]


def _parts(content: str | Sequence[ContentBlockParam], path: str) -> Iterator[str | SentImage]:
    """Yield the texts and images of ``content``."""
    if isinstance(content, str):
        yield content
        return
    for block_path, block in with_paths(content, path):
        yield from _block_parts(block, block_path)


def _block_parts(block: ContentBlockParam, path: str) -> Iterator[str | SentImage]:
    match block.type:
        case "image":
            yield _image(_source(block, path), path)
        case "document":
            yield from _document_parts(block, path)
        case _:
            yield _block_text(block, path)


def _image(source: BlockSource, path: str) -> SentImage:
    if source.type == "base64":
        data, is_url = required(source.data, f"{path}.source", "data"), False
    elif source.type == "url":
        data, is_url = required(source.url, f"{path}.source", "url"), True
    else:
        raise InvalidRequest(
            f"'{path}.source': the type of an image must be 'base64' or 'url', not "
            f"'{source.type}'.",
            param=f"{path}.source.type",
        )
    return SentImage(
        type="image", source=data, is_url=is_url, media_type=source.media_type, path=path
    )


def _source(block: ContentBlockParam, path: str) -> BlockSource:
    source = block.source
    if isinstance(source, str):
        raise InvalidRequest(f"'{path}.source' must be an object.", param=f"{path}.source")
    return required(source, path, "source")


def _document_parts(block: ContentBlockParam, path: str) -> Iterator[str | SentImage]:
    """Yield the content of a document that is text or blocks. PDFs are rejected."""
    if block.source is None:
        raise unsupported_content(block.type, path)
    source = _source(block, path)
    if source.type not in ("text", "content"):
        raise unsupported_content("pdf", path, "source.type")
    yield from filter(None, (block.title, block.context))
    if source.type == "text":
        yield required(source.data, f"{path}.source", "data")
        return
    content_path = f"{path}.source.content"
    if not isinstance(source.content, list):
        yield required(source.content, f"{path}.source", "content")
        return
    for inner_path, inner in with_paths(source.content, content_path):
        if inner.type not in ("text", "image"):
            raise unsupported_content(inner.type, inner_path)
        yield from _block_parts(inner, inner_path)


def _text(content: str | Sequence[ContentBlockParam], path: str, separator: str) -> str:
    if isinstance(content, str):
        return content
    blocks = with_paths(content, path)
    return separator.join(_block_text(block, block_path) for block_path, block in blocks)


def _block_text(block: ContentBlockParam, path: str) -> str:
    match block.type:
        case "text":
            return required(block.text, path, "text")
        case "compaction":
            return _plain(block)
        case "search_result":
            source = block.source if isinstance(block.source, str) else None
            return "\n".join(filter(None, (block.title, source, _plain(block))))
        case _ if block.is_foreign:
            fields = {"name": block.name, "input": block.input, "content": _plain(block)}
            return item_note(block.type, fields)
    raise unsupported_content(block.type, path)


def _plain(block: ContentBlockParam, depth: int = 3) -> str:
    """Return the texts in ``block`` and in those nested in it."""
    content = block.content
    match content:
        case list():
            inner = [_plain(each, depth - 1) for each in content if depth > 1]
        case dict():
            inner = [msgspec.json.encode(content).decode()]
        case _:
            inner = [content or ""]
    own = (block.title, block.url, block.text, block.tool_name)
    return "\n".join(filter(None, [*(own if depth < 3 else ()), *inner]))
