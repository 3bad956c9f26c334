"""A model's chat template: from messages and tools to the text of a prompt.

The template is a program of somebody else's. It runs in the sandbox of transformers, and
what clients write is never more than data to it.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from router.errors import InvalidRequest
from router.schemas.conversation import ChatMessage, FunctionCall, PromptEnding, Tool

logger = logging.getLogger(__name__)

TOKEN_BREAK = "\ufdd0"
"""Stands where text may not be read across: within what clients write like a control token.
A noncharacter, which no text has."""

_MAX_ARGS = 32
_RESERVED_ARGS = frozenset(
    (
        "conversation",
        "messages",
        "tools",
        "documents",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
        "processor_kwargs",
    )
)
"""What `apply_chat_template` itself takes: a client's own template would be its program
running here, and the rest would change what comes back."""

_PROBE_CALL = {"id": "call00000", "type": "function"}
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "Probes.",
        "parameters": {"type": "object", "properties": {"probed": {"type": "string"}}},
    },
}
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")


class ChatTemplate:
    """``template_args`` are the operator's arguments for the template; ``has_reasoning`` says
    whether the model marks its reasoning."""

    def __init__(
        self, tokenizer: Any, template_args: Mapping[str, Any], *, has_reasoning: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._template_args = dict(template_args)
        # mlx-lm says false of its own accord for models whose markers it does not know.
        self._defaults = (
            {"enable_thinking": True} if has_reasoning and not tokenizer.has_thinking else {}
        )
        source = str(tokenizer.chat_template or "")
        self._reasoning_key = _reasoning_key(source)
        self.short_ids = "[TOOL_CALLS]" in source
        """Mistral's templates take ids of nine letters and digits only."""
        self._arguments_as_text: bool | None = None
        special = [
            str(token)
            for token in tokenizer.added_tokens_decoder.values()
            if token.special and len(str(token)) > 1
        ]
        self._control_tokens = re.compile("|".join(map(re.escape, special))) if special else None

    def render(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Tool],
        template_args: Mapping[str, Any],
        *,
        ending: PromptEnding = "generation_prompt",
    ) -> str:
        """The prompt, with a `TOKEN_BREAK` in what is not to become a control token. Raises
        `InvalidRequest` for what the template does not take: content of other kinds, an
        order of roles, no template at all."""
        for name in template_args:
            if name in _RESERVED_ARGS or len(template_args) > _MAX_ARGS:
                raise InvalidRequest(
                    f"'{name}' cannot be set in 'chat_template_kwargs'.",
                    param="chat_template_kwargs",
                )
        if not self._tokenizer.has_chat_template:
            raise InvalidRequest(
                "This model has no chat template; use /v1/completions, or start the server"
                " with --chat-template.",
                param="messages",
            )
        try:
            conversation = self._break_control_tokens(self._conversation(messages))
            described = self._break_control_tokens([tool_schema(tool) for tool in tools]) or None
            args = self._template_args | self._break_control_tokens(dict(template_args))
        except RecursionError:
            raise InvalidRequest("The messages are nested too deeply.", param="messages") from None
        return self._render(conversation, described, args, ending)

    def _render(
        self,
        conversation: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        args: dict[str, Any],
        ending: PromptEnding,
    ) -> str:
        # An argument that this template or tokenizer raises on is left out: the last
        # one given first, then all of them.
        attempts = [args]
        attempts += [{k: v for k, v in args.items() if k != name} for name in reversed(args)]
        attempts += [{}] if len(attempts) > 2 else []
        failure: Exception | None = None
        for attempt in attempts:
            try:
                return self._apply(conversation, tools, attempt, ending)
            except Exception as error:  # a template is a program of somebody else
                failure = failure or error
        logger.debug("the chat template raised", exc_info=failure)
        raise InvalidRequest(
            f"The model's chat template refused these messages: {failure}", param="messages"
        )

    def _apply(
        self,
        conversation: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        args: Mapping[str, Any],
        ending: PromptEnding,
    ) -> str:
        # Only where it says something: templates that are functions do not know the argument.
        continued = {"continue_final_message": True} if ending == "open_message" else {}
        return str(
            self._tokenizer.apply_chat_template(
                conversation,
                tools=tools,
                tokenize=False,
                add_generation_prompt=ending == "generation_prompt",
                **continued,
                **{**self._defaults, **args},
            )
        )

    def _break_control_tokens(self, value: Any) -> Any:
        """``value`` with a `TOKEN_BREAK` in every control token that is spelled out in it."""
        if isinstance(value, str):
            value = value.replace(TOKEN_BREAK, "")
            if self._control_tokens is None:
                return value
            return self._control_tokens.sub(
                lambda found: found[0][0] + TOKEN_BREAK + found[0][1:], value
            )
        if isinstance(value, list):
            return [self._break_control_tokens(each) for each in value]
        if isinstance(value, dict):
            return {
                self._break_control_tokens(key): self._break_control_tokens(each)
                for key, each in value.items()
            }
        return value

    # -- messages --------------------------------------------------------------

    def _conversation(self, messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
        """Messages as templates expect them: text content, no empty keys, and a tool's
        name beside what it says."""
        names: dict[str, str] = {}
        found = []
        for index, message in enumerate(messages):
            plain = self._message(message, f"messages[{index}]")
            for call in message.tool_calls or ():
                if call.id is not None:
                    names[call.id] = call.function.name
            if message.role == "tool" and message.tool_call_id in names:
                plain.setdefault("name", names[message.tool_call_id])
            found.append(plain)
        return found

    def _message(self, message: ChatMessage, where: str) -> dict[str, Any]:
        if message.audio is not None:
            raise InvalidRequest(
                "Audio is not supported; this server takes text.",
                param=f"{where}.audio",
                code="unsupported_content",
            )
        role = "system" if message.role == "developer" else message.role
        plain: dict[str, Any] = {"role": role, "content": _content(message, where)}
        if message.name is not None:
            plain["name"] = message.name
        if message.tool_call_id is not None:
            plain["tool_call_id"] = self._call_id(message.tool_call_id)
        calls = [self._call(call.function, call.id) for call in message.tool_calls or ()]
        if message.function_call is not None:
            calls.append(self._call(message.function_call, None))
        if calls:
            plain["tool_calls"] = calls
        reasoning = message.reasoning_content or message.reasoning
        # gpt-oss' template takes one of content and thinking with a call.
        if reasoning and not (self._reasoning_key == "thinking" and calls and plain["content"]):
            plain[self._reasoning_key] = reasoning
        return plain

    def _call(self, function: FunctionCall, own_id: str | None) -> dict[str, Any]:
        call: dict[str, Any] = {
            "type": "function",
            "function": {"name": function.name, "arguments": self._arguments(function.arguments)},
        }
        return call if own_id is None else {"id": self._call_id(own_id), **call}

    def _call_id(self, own_id: str) -> str:
        if not self.short_ids or _SHORT_ID.fullmatch(own_id):
            return own_id
        digits = "".join(char for char in own_id if char.isascii() and char.isalnum())
        return digits[-9:].rjust(9, "0")

    def _arguments(self, arguments: str | dict[str, Any] | None) -> Any:
        """As the template wants them: most iterate over an object, some add text to text.
        What is no JSON goes as it is."""
        if self._arguments_as_text is None:
            self._arguments_as_text = self._wants_text()
        if self._arguments_as_text:
            if isinstance(arguments, str):
                return arguments or "{}"
            return json.dumps(arguments or {}, ensure_ascii=False)
        if not isinstance(arguments, str):
            return arguments or {}
        try:
            return json.loads(arguments) if arguments else {}
        except ValueError:
            return arguments

    def _wants_text(self) -> bool:
        """Whether the template writes arguments as they are, found by giving it some."""

        def probe(arguments: Any) -> str:
            function = {"name": "probe", "arguments": arguments}
            asked = {"role": "user", "content": "x"}
            called = {
                "role": "assistant",
                "content": "",
                "tool_calls": [{**_PROBE_CALL, "function": function}],
            }
            return self._apply([asked, called], [_PROBE_TOOL], self._template_args, "last_message")

        try:
            return "{'probed'" in probe({"probed": "x"})
        except Exception:  # a template is a program of somebody else
            pass
        try:
            return "probed" in probe('{"probed": "x"}')
        except Exception:
            return False


def tool_schema(tool: Tool) -> dict[str, Any]:
    """A tool as models are told of it, in the form of transformers' ``get_json_schema``."""
    function = tool.function
    told: dict[str, Any] = {"name": function.name}
    if function.description is not None:
        told["description"] = function.description
    told["parameters"] = function.parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": told}


def _content(message: ChatMessage, where: str) -> str:
    if message.content is None or isinstance(message.content, str):
        return message.content or message.refusal or ""
    texts: list[str] = []
    for index, part in enumerate(message.content):
        param = f"{where}.content[{index}]"
        if part.type not in ("text", "refusal"):
            raise InvalidRequest(
                f"Content of type '{part.type}' is not supported; this server takes text.",
                param=f"{param}.type",
                code="unsupported_content",
            )
        text = part.text if part.type == "text" else part.refusal
        if text is None:
            raise InvalidRequest(f"'{param}' has no {part.type}.", param=f"{param}.{part.type}")
        texts.append(text)
    return "".join(texts)


def _reasoning_key(source: str) -> str:
    """The name under which a template looks for the reasoning of earlier replies."""
    for name in ("reasoning_content", "reasoning", "thinking"):
        if re.search(rf"""\.{name}\b|['"]{name}['"]""", source):
            return name
    return "reasoning_content"
