"""Translation of Responses requests to `ChatRequest`s."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from msgspec.structs import replace

from router.api.history import definitions, item_note
from router.api.translation import (
    assistant_message,
    content_note,
    joined_content,
    required,
    sent_image,
    with_paths,
)
from router.errors import InvalidRequest, NotFound
from router.responses.calls import called_function, output_content, tool_call
from router.responses.schemas import (
    CALL_OUTPUT_TYPES,
    CALL_TYPES,
    InputItem,
    ItemContentPart,
    ResponsesRequest,
    TextFormat,
)
from router.responses.tools import ClientTool, found_tools, tool_choice
from router.schemas.body import validated
from router.schemas.conversation import (
    MAX_TOOLS,
    PARAGRAPH_BREAK,
    ChatMessage,
    ContentPart,
    LaterTool,
    Tool,
    unsupported_content,
)
from router.schemas.requests import ChatRequest
from router.schemas.sampling import sampling_fields
from router.schemas.structured import JsonSchemaFormat, ResponseFormat

_ID_PREFIXES = {
    "reasoning": "rs_",
    "function_call": "fc_",
    "function_call_output": "fco_",
    **dict.fromkeys(("compaction", "context_compaction"), "cmp_"),
}
_REQUIRED = {
    "function_call": ("call_id", "name", "arguments"),
    "custom_tool_call": ("call_id", "name", "input"),
    "local_shell_call": ("call_id", "action"),
    "shell_call": ("call_id", "action"),
    "apply_patch_call": ("call_id", "operation"),
    "tool_search_call": ("call_id", "arguments"),
}
"""The required fields of calls."""
_ADDS_TOOLS = ("tool_search_output", "additional_tools")
_TEXT_TYPES = ("input_text", "output_text", "text", "reasoning_text", "refusal")


def chat_request(
    body: ResponsesRequest,
    items: Sequence[InputItem],
    tools: Sequence[ClientTool],
    num_earlier: int = 0,
) -> ChatRequest:
    """Return the chat request for ``body``, with the conversation ``items`` from `resolve_input`
    and its ``tools`` from `known_tools`. The first ``num_earlier`` items are from earlier
    responses. Raises `InvalidRequest` with the name of the field."""
    fields = sampling_fields(body)
    text, reasoning = body.text, body.reasoning
    for item in items:
        if item.type == "configuration_update":
            text, reasoning = item.text or text, item.reasoning or reasoning
    text_format = text.format if text else None
    # Without any tool in the prompt, the model would not learn how to call one.
    may_wait = any(not tool.is_deferred for tool in tools)
    if text_format is not None:
        fields["response_format"] = _response_format(text_format)
    return validated(
        ChatRequest(
            **fields,
            messages=_messages(items, body.instructions, num_earlier, tools),
            max_tokens=body.max_output_tokens,
            stop=body.stop,
            tools=[
                (LaterTool if may_wait and tool.is_deferred else Tool)(function=tool.function)
                for tool in tools
            ],
            tool_choice=tool_choice(body.tool_choice),
            parallel_tool_calls=body.parallel_tool_calls,
            reasoning_effort=reasoning.effort if reasoning else None,
            logprobs=body.wants_logprobs or None,
            top_logprobs=body.top_logprobs,
            chat_template_kwargs=body.chat_template_kwargs,
        )
    )


def _response_format(text_format: TextFormat) -> ResponseFormat:
    if text_format.type != "json_schema":
        return ResponseFormat(type=text_format.type)
    assert text_format.schema is not None  # `ResponsesRequest.check` rejects it
    return ResponseFormat(
        type="json_schema",
        json_schema=JsonSchemaFormat(
            name=text_format.name, schema=text_format.schema, strict=text_format.strict
        ),
    )


def known_tools(
    tools: Sequence[ClientTool], items: Sequence[InputItem], num_earlier: int = 0
) -> list[ClientTool]:
    """Return ``tools`` and those that ``items`` make available. Raises `InvalidRequest`."""
    names = {tool.function.name for tool in tools}
    found: dict[str, ClientTool] = {}
    for index, item in enumerate(items, -num_earlier):
        if item.type in _ADDS_TOOLS:
            for tool in found_tools(item, _path(index)):
                if tool.function.name not in names:
                    found.setdefault(tool.function.name, tool)
    if len(tools) + len(found) > MAX_TOOLS:
        raise InvalidRequest(f"There are more than {MAX_TOOLS} tools.", param="tools")
    return [*tools, *found.values()]


def _path(index: int) -> str:
    return "previous_response_id" if index < 0 else f"input[{index}]"


# -- messages ------------------------------------------------------------------


def conversation(items: Sequence[InputItem]) -> list[ChatMessage]:
    """Return the messages of a conversation that has no tools. Raises `InvalidRequest`."""
    return _messages(items, None, 0, [])


def _messages(
    items: Sequence[InputItem],
    instructions: str | None,
    num_earlier: int,
    tools: Sequence[ClientTool],
) -> list[ChatMessage]:
    """Return the messages of a conversation. The first message combines the instructions and the
    system messages. Consecutive items of the assistant (reasoning, text and calls) become one
    message."""
    messages: list[ChatMessage] = []
    system_texts = [instructions] if instructions else []
    tool_names: dict[str | None, str | None] = {}  # keyed by the id of the call
    turn: list[InputItem] = []  # consecutive items of the assistant
    hidden = {
        tool.function.name: Tool(function=tool.function) for tool in tools if tool.is_deferred
    }
    for index, item in enumerate(items, -num_earlier):
        path = _path(index)
        if item.type in _ADDS_TOOLS:
            found = [hidden.pop(tool.function.name, None) for tool in found_tools(item, path)]
            text = definitions(filter(None, found))
            if item.type == "tool_search_output":
                item = replace(item, output=text)
            else:
                item = replace(item, type="message", role="developer", content=text)
        if (called := called_function(item)) is not None:
            tool_names[item.call_id] = called
        if item.role in ("system", "developer") and not messages and not turn:
            system_texts.append(_text(item.content))
        elif item.is_foreign or item.type in ("reasoning", *CALL_TYPES) or item.role == "assistant":
            turn.append(item)
        elif item.type == "configuration_update":
            continue
        else:
            messages += _assistant_messages(turn)
            turn = []
            messages.append(_message(item, path, tool_names))
    messages += _assistant_messages(turn)
    if system_texts:
        messages.insert(0, ChatMessage("system", PARAGRAPH_BREAK.join(system_texts)))
    return messages


def _assistant_messages(turn: Sequence[InputItem]) -> Iterable[ChatMessage]:
    """Return one message, or none if ``turn`` is empty."""
    if not turn:
        return ()
    texts = [
        f"\n{_note(item)}\n" if item.is_foreign else _text(item.content)
        for item in turn
        if item.is_foreign or item.type == "message"
    ]
    thoughts = [
        _text(item.content) or _text(item.summary, PARAGRAPH_BREAK)
        for item in turn
        if item.type == "reasoning"
    ]
    calls = [tool_call(item) for item in turn if item.type in CALL_TYPES]
    return (assistant_message(texts, thoughts, calls),)


def _note(item: InputItem) -> str:
    output = item.output
    if isinstance(output, dict):
        output = {name: value for name, value in output.items() if name != "image_url"}
    fields: dict[str, Any] = {"server": item.server_label, "name": item.name}
    fields |= {"status": item.status if item.status != "completed" else None}
    fields |= {"approve": None if item.approve is None else str(item.approve).lower()}
    fields |= {each: getattr(item, each) for each in ("action", "queries", "arguments", "code")}
    texts = _text(output) if isinstance(output, list) else output
    fields |= {"input": item.input, "output": texts, "results": item.results, "error": item.error}
    return item_note(item.type or "", fields | {"content": _text(item.content)})


def _message(item: InputItem, path: str, tool_names: dict[str | None, str | None]) -> ChatMessage:
    if item.type in CALL_OUTPUT_TYPES:
        name = tool_names.get(item.call_id)
        content = output_content(item, path)
        return ChatMessage("tool", content, name=name, tool_call_id=item.call_id)
    assert item.role is not None
    if isinstance(item.content, list):
        return ChatMessage(item.role, _content(item.content, f"{path}.content"))
    return ChatMessage(item.role, item.content or "")


def _content(parts: Sequence[ItemContentPart], path: str) -> str | list[ContentPart]:
    return joined_content(
        (
            sent_image(part.image_url, part_path, "input_image")
            if part.type == "input_image"
            else part.text or part.refusal or ""
            for part_path, part in with_paths(parts, path)
        ),
        "",
    )


def _text(content: str | Sequence[ItemContentPart] | None, separator: str = "") -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return separator.join(part.text or part.refusal or "" for part in content)


def with_notes(items: Sequence[InputItem]) -> list[InputItem]:
    """Return ``items`` with a note in place of each unsupported part, except images: whether these
    are supported depends on the model."""
    return [
        replace(item, content=_noted(item.content), output=_noted(item.output)) for item in items
    ]


def _noted(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    return [
        part
        if part.type is None or part.type in (*_TEXT_TYPES, "input_image")
        else ItemContentPart(type="input_text", text=content_note(part.type))
        for part in content
    ]


# -- input items ---------------------------------------------------------------


def resolve_input(
    given: str | Sequence[InputItem],
    find_item: Callable[[str], InputItem | None],
    unseal: Callable[[str], str | None],
) -> list[InputItem]:
    """Return the items of an input, each complete and with a type and an id. References are
    replaced with the result of ``find_item``, encrypted reasoning with the result of ``unseal``.
    Raises `NotFound` if an item does not exist, and `InvalidRequest`; both name the field."""
    if isinstance(given, str):
        given = [InputItem(role="user", content=given)]
    items = [_resolve(item, path, find_item) for path, item in with_paths(given, "input")]
    return [_unsealed(item, unseal) if item.type == "reasoning" else item for item in items]


def _unsealed(item: InputItem, unseal: Callable[[str], str | None]) -> InputItem:
    text = unseal(item.encrypted_content) if item.encrypted_content else None
    if text is None:
        return item
    return replace(item, content=[ItemContentPart(type="reasoning_text", text=text)])


def _resolve(item: InputItem, path: str, find_item: Callable[[str], InputItem | None]) -> InputItem:
    item_type = item.type or ("message" if item.role is not None else "item_reference")
    match item_type:
        case "message":
            role = required(item.role, path, "role")
            parts = item.content
            if isinstance(parts, str):
                text_type = "output_text" if role == "assistant" else "input_text"
                parts = [ItemContentPart(type=text_type, text=parts)]
            parts = required(parts, path, "content")
            _check_parts(parts, f"{path}.content", images=role == "user")
            item = replace(item, content=parts, status=item.status or "completed")
        case "tool_search_call" | "tool_search_output" if item.call_id is None:
            # One that OpenAI's server has run.
            item = replace(item, call_id="tool_search", arguments=item.arguments or {})
        case _ if item_type in CALL_TYPES:
            for name in _REQUIRED[item_type]:
                required(getattr(item, name), path, name)
        case _ if item_type in CALL_OUTPUT_TYPES:
            item = _checked_output(item, item_type, path)
        case "reasoning":
            if isinstance(item.content, list):
                _check_parts(item.content, f"{path}.content", images=False)
        case "item_reference":
            return _referenced(required(item.id, path, "id"), path, find_item)
    prefix = _ID_PREFIXES.get(item_type, "msg_")
    return replace(item, type=item_type, id=item.id or prefix + uuid.uuid4().hex)


def _checked_output(item: InputItem, item_type: str, path: str) -> InputItem:
    """Return ``item``, a call's result, with the id of the call."""
    call_id = item.call_id
    if item_type == "local_shell_call_output":
        call_id = call_id or item.id  # its place in OpenAI's specification
    call_id = required(call_id, path, "call_id")
    output = item.output
    # The status of a patch may be its whole result, and the result of a search is its tools.
    if item_type not in ("apply_patch_call_output", "tool_search_output"):
        required(output, path, "output")
    path += ".output"
    if isinstance(output, dict):
        raise InvalidRequest(f"'{path}' must be text or a list of parts.", param=path)
    if isinstance(output, list) and item_type != "shell_call_output":
        _check_parts(output, path, images=True)
    return replace(item, call_id=call_id)


def _referenced(item_id: str, path: str, find_item: Callable[[str], InputItem | None]) -> InputItem:
    item = find_item(item_id)
    if item is None:
        raise NotFound(
            f"'{path}': there is no item '{item_id}'. Items are stored with their responses, "
            "which are dropped after a while.",
            param=f"{path}.id",
            code="item_not_found",
        )
    return item


def _check_parts(parts: Sequence[ItemContentPart], path: str, *, images: bool) -> None:
    """Raise `InvalidRequest` for parts other than text and, if allowed, ``images``."""
    for part_path, part in with_paths(parts, path):
        part_type = required(part.type, part_path, "type")
        if part_type == "input_image" and images:
            required(part.image_url, part_path, "image_url")
            continue
        if part_type not in _TEXT_TYPES:
            raise unsupported_content(part_type, part_path)
        name = "refusal" if part.type == "refusal" else "text"
        required(getattr(part, name), part_path, name)
