"""A conversation in the format of OpenAI's chat API: messages, tools and tool calls.

The requests of all other APIs are translated to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct
from msgspec.structs import force_setattr

from router.errors import ContentNotSupported, InvalidRequest, InvalidValue
from shared.wire import Grammar

ToolName = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[\w.:/@-]+\Z")]

MAX_TOOLS = 512
MAX_SCHEMA_DEPTH = 100
"""Max nesting of objects and arrays in the parameters of a tool."""

PARAGRAPH_BREAK = "\n\n"
"""The separator of texts that are joined into one."""

TEXT_PARTS = ("text", "refusal")
"""The supported types of content."""


def unsupported_content(content_type: str, path: str, field: str = "type") -> ContentNotSupported:
    """Return the error for content of a type that is refused, in the ``field`` of ``path``."""
    advice = "; this server accepts text."
    if content_type in ("file", "input_file", "pdf"):
        advice = ": send a PDF's text, or its pages as images."
    return ContentNotSupported(
        f"'{path}': content of type '{content_type}' is not supported{advice}",
        param=f"{path}.{field}",
    )


class ImageUrl(Struct, frozen=True):
    """An image as a `data:` URL, or an `https:` URL on a host of `--image-hosts`. ``detail`` is
    accepted and has no effect: the model's processor decides the size of an image."""

    url: str
    detail: str | None = None


class ContentPart(Struct, frozen=True):
    """A part of a message's content: text, or an image if the model accepts images."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: ImageUrl | str | None = None

    @property
    def image_chars(self) -> int:
        url = self.image_url
        return len(url.url if isinstance(url, ImageUrl) else url or "")


class PredictedText(Struct, frozen=True):
    text: str
    type: Literal["text"] = "text"


class PredictedContent(Struct, frozen=True):
    """Text that the answer is likely to repeat in large parts."""

    content: str | list[PredictedText]
    type: Literal["content"] = "content"

    @property
    def joined(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class FunctionCall(Struct, frozen=True):
    name: Annotated[str, Meta(max_length=1024)]
    arguments: Annotated[
        str | dict[str, Any] | None, Meta(description="An object, or its JSON text.")
    ] = None


class ToolCall(Struct, frozen=True):
    """A tool call of an earlier answer."""

    function: FunctionCall
    id: str | None = None
    type: Literal["function"] = "function"


class ChatMessage(Struct, frozen=True):
    """``reasoning`` is another name of ``reasoning_content``. ``function_call`` is an older form of
    a single tool call, and the role ``function`` of ``tool``."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    function_call: FunctionCall | None = None
    audio: Any = None


def image_chars(messages: Sequence[ChatMessage]) -> int:
    """Return the number of characters of the images in ``messages``."""
    return sum(
        part.image_chars
        for message in messages
        if isinstance(message.content, list)
        for part in message.content
    )


class FunctionDefinition(Struct, frozen=True, kw_only=True):
    name: ToolName
    description: str | None = None
    parameters: Annotated[
        dict[str, Any] | None,
        Meta(description="JSON schema of the arguments. Null: no arguments."),
    ] = None
    strict: Annotated[
        bool | None, Meta(description="Whether generation is constrained to the schema.")
    ] = None

    def __post_init__(self) -> None:
        """Raises `InvalidValue`. Clients without an empty object send null or an empty list."""
        parameters = self.parameters
        if parameters is None:
            return
        if is_deeper(parameters, MAX_SCHEMA_DEPTH):
            raise self._invalid("are nested too deeply")
        properties, required = parameters.get("properties"), parameters.get("required")
        if properties and not isinstance(properties, dict):
            raise self._invalid("have 'properties' that are not an object")
        if required and not (
            isinstance(required, list) and all(isinstance(name, str) for name in required)
        ):
            raise self._invalid("have a 'required' that is not a list of names")
        kinds = {"properties": dict, "required": list}
        if any(not isinstance(parameters.get(key, kind()), kind) for key, kind in kinds.items()):
            rest = {key: value for key, value in parameters.items() if value or key != "required"}
            rest |= {} if properties else {"properties": {}}
            force_setattr(self, "parameters", rest)

    def _invalid(self, reason: str) -> InvalidValue:
        return InvalidValue(f"The parameters of the tool '{self.name}' {reason}.", param="tools")


def is_deeper(schema: Any, depth: int) -> bool:
    """Return whether objects and arrays in ``schema`` are nested more than ``depth`` levels."""
    level = [schema]
    for _ in range(depth + 1):
        level = [item for item in level if isinstance(item, dict | list)]
        if not level:
            return False
        level = [
            each for item in level for each in (item.values() if isinstance(item, dict) else item)
        ]
    return True


class TextFunction(FunctionDefinition, frozen=True, kw_only=True):
    """A function with one argument, ``input``: text that matches a grammar. Requests cannot contain
    it; it represents a tool of another kind."""

    input_grammar: Grammar


class Tool(Struct, frozen=True, kw_only=True):
    function: FunctionDefinition
    type: Literal["function"] = "function"


class LaterTool(Tool, frozen=True, kw_only=True):
    """A tool that can be called, but that only the conversation shows, where it becomes
    available. Requests cannot contain it."""


class FunctionName(Struct, frozen=True):
    name: ToolName


class NamedTool(Struct, frozen=True, kw_only=True):
    function: FunctionName
    type: Literal["function"] = "function"


class AllowedTools(Struct, frozen=True, kw_only=True):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Meta(min_length=1, max_length=MAX_TOOLS)]


class ToolChoice(Struct, frozen=True, kw_only=True):
    """The one tool that must be called, or the only ones that may be called."""

    type: Literal["function", "allowed_tools"]
    function: FunctionName | None = None
    allowed_tools: AllowedTools | None = None


ToolMode = Literal["none", "auto", "required"]

PromptEnding = Literal["generation_prompt", "last_message", "open_message"]
"""What follows the last message in a prompt: the start of an answer, or nothing. In the second case
the prompt ends inside an open message, and the answer continues it."""


def prompt_ending(
    messages: Sequence[ChatMessage] | None,
    add_generation_prompt: bool | None,
    continue_final_message: bool | None,
) -> PromptEnding:
    """Return the ending for the request fields with these names. Raises `InvalidRequest`."""
    if not continue_final_message:
        return "last_message" if add_generation_prompt is False else "generation_prompt"
    last = messages[-1] if messages else None
    if last is None or last.role != "assistant" or last.tool_calls or last.function_call:
        raise InvalidRequest(
            "'continue_final_message' requires that the last message is the assistant's, without "
            "tool calls.",
            param="continue_final_message",
        )
    if add_generation_prompt:
        raise InvalidRequest(
            "'add_generation_prompt' cannot be combined with 'continue_final_message'.",
            param="add_generation_prompt",
        )
    return "open_message"
