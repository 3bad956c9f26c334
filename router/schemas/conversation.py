"""A conversation as OpenAI's chat API has it: messages, the tools a model may call, its calls.

Every API that takes conversations is translated into these.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from router.errors import InvalidRequest

ToolName = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[\w.:/@-]+\Z")]

MAX_TOOLS = 512


class ContentPart(Struct, frozen=True):
    """A part of a message's content; `router.tokens.rendering` refuses what is not text."""

    type: str
    text: str | None = None
    refusal: str | None = None


class FunctionCall(Struct, frozen=True):
    """``arguments`` are JSON text, or what it says."""

    name: Annotated[str, Meta(max_length=1024)]
    arguments: str | dict[str, Any] | None = None


class ToolCall(Struct, frozen=True):
    """A call that an assistant has made."""

    function: FunctionCall
    id: str | None = None
    type: Literal["function"] = "function"


class ChatMessage(Struct, frozen=True):
    """``reasoning`` is another name of ``reasoning_content``. ``function_call`` is an older
    form of one tool call, ``function`` of the role ``tool``."""

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


class FunctionDefinition(Struct, frozen=True, kw_only=True):
    """``parameters`` is a JSON schema of the arguments; None for none at all. ``strict``
    arguments are held to it while they are generated."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct, frozen=True, kw_only=True):
    function: FunctionDefinition
    type: Literal["function"] = "function"


class FunctionName(Struct, frozen=True):
    name: ToolName


class NamedTool(Struct, frozen=True, kw_only=True):
    function: FunctionName
    type: Literal["function"] = "function"


class AllowedTools(Struct, frozen=True, kw_only=True):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Meta(min_length=1, max_length=MAX_TOOLS)]


class ToolChoice(Struct, frozen=True, kw_only=True):
    """One tool that has to be called, or the only ones that may."""

    type: Literal["function", "allowed_tools"]
    function: FunctionName | None = None
    allowed_tools: AllowedTools | None = None


ToolMode = Literal["none", "auto", "required"]

PromptEnding = Literal["generation_prompt", "last_message", "open_message"]
"""Behind the last message a prompt goes on with the beginning of a reply, or does not; or it ends
within that message, which the reply goes on from."""


def prompt_ending(
    messages: Sequence[ChatMessage] | None,
    add_generation_prompt: bool | None,
    continue_final_message: bool | None,
) -> PromptEnding:
    """What the fields of those names ask for. Raises `InvalidRequest`."""
    if not continue_final_message:
        return "last_message" if add_generation_prompt is False else "generation_prompt"
    last = messages[-1] if messages else None
    if last is None or last.role != "assistant" or last.tool_calls or last.function_call:
        raise InvalidRequest(
            "'continue_final_message' needs a last message of the assistant's, without calls.",
            param="continue_final_message",
        )
    if add_generation_prompt:
        raise InvalidRequest(
            "'add_generation_prompt' does not go with 'continue_final_message'.",
            param="add_generation_prompt",
        )
    return "open_message"
