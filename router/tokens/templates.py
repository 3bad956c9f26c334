"""A model's chat template: messages and tools to the text of a prompt.

A template is untrusted code. It runs in the sandbox of transformers, in a process of its own
(`router.tokens.template_process`), and clients' text is only data to it.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from router.errors import InvalidRequest
from router.schemas.conversation import (
    TEXT_PARTS,
    ChatMessage,
    FunctionCall,
    PromptEnding,
    Tool,
    unsupported_content,
)
from router.schemas.images import ImageContent, ModelImage
from router.tokens.conversations.calls import with_named_ids
from router.tokens.conversations.fitting import TemplateLimits, fitted, limits_of
from router.tokens.conversations.tools import ToolsPlace, tool_schema, tools_place, with_tools
from router.tokens.image_prompts import ImageMarks, ImageTexts, image_texts_of
from router.tokens.json_texts import decoded_json
from router.tokens.literals import literal_pattern
from router.tokens.parsing.calls import JSON, written_calls
from router.tokens.parsing.formats import CALL_FORMATS

logger = logging.getLogger(__name__)

TOKEN_BREAK = "\ufdd0"
"""Text before and after it is tokenized separately. It breaks up control tokens written by clients.
It is a noncharacter, which does not occur in text."""

_MAX_ARGS = 32
_RESERVED_ARGS = frozenset(
    "conversation messages tools documents chat_template add_generation_prompt"
    " continue_final_message tokenize padding truncation max_length return_tensors return_dict"
    " return_assistant_tokens_mask tokenizer_kwargs processor_kwargs".split()
)
"""Arguments of `apply_chat_template` itself. With `chat_template`, a client could run its own code
here; the others would change the result."""

_PROBE_MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "x"}]
_PROBE_CALL = {"id": "call00000", "type": "function"}
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "Probes.",
        "parameters": {"type": "object", "properties": {"probed": {"type": "string"}}},
    },
}
_Json = dict[str, Any]
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")


def check_args(template_args: Mapping[str, Any]) -> None:
    """Raise `InvalidRequest` for arguments that clients cannot set."""
    for name in template_args:
        if name in _RESERVED_ARGS or len(template_args) > _MAX_ARGS:
            raise InvalidRequest(
                f"'{name}' cannot be set in 'chat_template_kwargs'.",
                param="chat_template_kwargs",
            )


class Rendered(NamedTuple):
    """The text of a prompt, with a `TOKEN_BREAK` in text that must not become a control token."""

    text: str
    images: list[ModelImage]
    """The images, in the order of their placeholders in the text."""


class ChatTemplate:
    """The chat template of one model.

    ``template_args`` are the operator's arguments for it. ``has_reasoning`` says whether the
    model marks its reasoning. ``image_tokens`` are the texts of tokens that stand for images,
    the placeholder first; empty if the model accepts no images. ``call_syntax`` is the name of
    the parser of its calls."""

    def __init__(
        self,
        tokenizer: Any,
        template_args: Mapping[str, Any],
        *,
        has_reasoning: bool,
        image_tokens: Sequence[str] = (),
        call_syntax: str = JSON.name,
    ) -> None:
        self._tokenizer = tokenizer
        self._call_syntax = call_syntax
        self._template_args = dict(template_args)
        # mlx-lm passes false by default for models whose markers it does not know.
        unknown_markers = has_reasoning and not tokenizer.has_thinking
        self._defaults = {"enable_thinking": True} if unknown_markers else {}
        source = str(tokenizer.chat_template or "")
        # As in the templates of DeepSeek V3.1, Kimi K2.5 and Granite 3.3.
        self._calls_it_thinking = "enable_thinking" not in source and "thinking" in source
        self._reasoning_key = _reasoning_key(source)
        self.short_ids = "[TOOL_CALLS]" in source
        """Whether ids have nine letters and digits, as Mistral's templates require."""
        self._named_ids = "<|tool_calls_section_begin|>" in source
        self._arguments_as_text: bool | None = None  # None: unknown so far
        self._limits: TemplateLimits | None = None  # None: unknown so far
        self._tools_place: ToolsPlace | None = None  # None: unknown so far
        self._placeholder = next(iter(image_tokens), "")
        self._image_texts: ImageTexts | None = None  # None: unknown so far
        added = tokenizer.added_tokens_decoder.values()
        special = [str(token) for token in added if token.special and len(str(token)) > 1]
        self._control_tokens = literal_pattern([*special, *image_tokens])

    def render(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Tool],
        template_args: Mapping[str, Any],
        *,
        ending: PromptEnding = "generation_prompt",
    ) -> str:
        """Return the text of the prompt. Raises what `rendered` raises."""
        return self.rendered(messages, tools, template_args, ending=ending).text

    def rendered(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Tool],
        template_args: Mapping[str, Any],
        *,
        ending: PromptEnding = "generation_prompt",
    ) -> Rendered:
        """Return the text of the prompt, and its images.

        Raises `InvalidRequest` if there is no template, and for messages that it does not support,
        such as other content or an order of roles.
        """
        check_args(template_args)
        if not self._tokenizer.has_chat_template:
            raise InvalidRequest(
                "This model has no chat template; use /v1/completions, or start the server"
                " with --chat-template.",
                param="messages",
            )
        try:
            marks = ImageMarks()
            plain = fitted(self._conversation(messages, marks), self.limits)
            conversation = self._break_control_tokens(plain)
            schemas = self._break_control_tokens([tool_schema(tool) for tool in tools])
            conversation, shown = with_tools(
                conversation, schemas, self.tools_place, self.limits, self._call_syntax
            )
            images = marks.images_in(conversation)
            if marks:
                conversation = [self._with_images(message, marks) for message in conversation]
            conversation = [self._with_calls(message) for message in conversation]
            args = shown | self._template_args | self._break_control_tokens(dict(template_args))
        except RecursionError:
            raise InvalidRequest("The messages are nested too deeply.", param="messages") from None
        return Rendered(self._render(conversation, schemas or None, args, ending), images)

    def literal(self, text: str) -> str:
        """Return a client's ``text`` as it stands in a rendered prompt: without control tokens."""
        return str(self._break_control_tokens(text))

    @property
    def limits(self) -> TemplateLimits:
        """The forms that the template does not support, detected on first use."""
        if self._limits is None:
            self._limits = limits_of(self._render_probe, self._arguments)
        return self._limits

    @property
    def tools_place(self) -> ToolsPlace:
        """Where the template shows tools, detected on first use."""
        if self._tools_place is None:

            def applies(messages: list[_Json], tools: list[_Json] | None, args: _Json) -> str:
                return self._apply(messages, tools, args | self._template_args, "last_message")

            self._tools_place = tools_place(applies, _PROBE_TOOL, self.limits)
        return self._tools_place

    def _render_probe(self, messages: list[_Json], with_tool: bool) -> str:
        tools = [_PROBE_TOOL] if with_tool else None
        return self._apply(messages, tools, self._template_args, "last_message")

    def _with_images(self, message: _Json, marks: ImageMarks) -> _Json:
        """Return ``message`` with its images in place of their marks."""
        if self._image_texts is None:
            function = {"name": "probe", "arguments": self._arguments('{"probed": "x"}')}
            call = {**_PROBE_CALL, "function": function}
            self._image_texts = image_texts_of(self._render_probe, self._placeholder, call)
        content = message["content"]
        if message["role"] in self._image_texts.in_parts:
            return {**message, "content": marks.in_parts(content)}
        return {**message, "content": marks.replaced(content, self._image_texts.text)}

    def _with_calls(self, message: _Json) -> _Json:
        """Return ``message`` with its calls where the template shows them. This comes last,
        because clients must not write markers of calls."""
        if not (self.limits.calls and message.get("tool_calls")):
            return message
        content = message["content"]
        kept = {key: value for key, value in message.items() if key != "tool_calls"}
        functions = [each["function"] for each in message["tool_calls"]]
        written = written_calls(CALL_FORMATS.get(self._call_syntax, JSON), functions)
        if isinstance(content, str):
            return {**kept, "content": content + written}
        return {**kept, "content": [*content, {"type": "text", "text": written}]}

    def _render(
        self, messages: list[_Json], tools: list[_Json] | None, args: _Json, ending: PromptEnding
    ) -> str:
        failure: Exception
        try:
            return self._apply(messages, tools, args, ending)
        except Exception as error:  # a template is untrusted code
            failure = error
        usable = self._usable_args(args)
        if len(usable) < len(args):
            try:
                return self._apply(messages, tools, usable, ending)
            except Exception:
                pass
        logger.debug("the chat template raised an exception", exc_info=failure)
        raise InvalidRequest(
            f"The model's chat template rejected these messages: {failure}", param="messages"
        )

    def _usable_args(self, args: _Json) -> _Json:
        """Return the ``args`` with which the template and the tokenizer do not raise: all, all but
        one (trying the last first), or none.

        They are tried on one short message, because rendering the conversation takes as long as a
        request.
        """
        attempts = [args]
        attempts += [{k: v for k, v in args.items() if k != name} for name in reversed(args)]
        for attempt in attempts:
            try:
                self._apply(_PROBE_MESSAGES, None, attempt, "generation_prompt")
            except Exception:  # a template is untrusted code
                continue
            return attempt
        return {}

    def _apply(
        self, messages: list[_Json], tools: list[_Json] | None, args: _Json, ending: PromptEnding
    ) -> str:
        # Only if true: templates that are functions do not know the argument.
        continued = {"continue_final_message": True} if ending == "open_message" else {}
        if self._calls_it_thinking and "enable_thinking" in args:
            args = {"thinking": args["enable_thinking"], **args}
        return str(
            self._tokenizer.apply_chat_template(
                messages,
                tools=tools,
                tokenize=False,
                add_generation_prompt=ending == "generation_prompt",
                **continued,
                **{**self._defaults, **args},
            )
        )

    def _break_control_tokens(self, value: Any) -> Any:
        """Return ``value`` with a `TOKEN_BREAK` in every control token written in it."""
        if isinstance(value, str):
            value = value.replace(TOKEN_BREAK, "")
            if self._control_tokens is None:
                return value
            return self._control_tokens.sub(lambda m: m[0][0] + TOKEN_BREAK + m[0][1:], value)
        if isinstance(value, list):
            return [self._break_control_tokens(each) for each in value]
        if isinstance(value, dict):
            broken = self._break_control_tokens
            return {broken(key): broken(each) for key, each in value.items()}
        return value

    # -- messages --------------------------------------------------------------

    def _conversation(
        self, messages: Sequence[ChatMessage], marks: ImageMarks
    ) -> list[dict[str, Any]]:
        """Return messages as templates expect them: content is text, with ``marks`` for images,
        there are no empty keys, and a tool result has the tool's name."""
        names: dict[str, str] = {}  # by call id
        conversation = []
        for index, message in enumerate(messages):
            plain = self._message(message, f"messages[{index}]", marks)
            for call in message.tool_calls or ():
                if call.id is not None:
                    names[call.id] = call.function.name
            if message.role == "tool" and message.tool_call_id in names:
                plain.setdefault("name", names[message.tool_call_id])
            conversation.append(plain)
        return with_named_ids(conversation) if self._named_ids else conversation

    def _message(self, message: ChatMessage, path: str, marks: ImageMarks) -> dict[str, Any]:
        if message.audio is not None:
            raise unsupported_content("audio", path, "audio")
        role = "system" if message.role == "developer" else message.role
        plain: dict[str, Any] = {"role": role, "content": _content(message, path, marks)}
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
        # gpt-oss' template accepts either content or thinking with a call, not both.
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
        """Return ``arguments`` in the form that the template expects: most templates iterate over
        an object, some concatenate text. Text that is not JSON is passed unchanged."""
        if self._arguments_as_text is None:
            self._arguments_as_text = self._takes_arguments_as_text()
        if self._arguments_as_text:
            if isinstance(arguments, str):
                return arguments or "{}"
            return json.dumps(arguments or {}, ensure_ascii=False)
        if not isinstance(arguments, str):
            return arguments or {}
        try:
            return decoded_json(arguments) if arguments else {}
        except ValueError:
            return arguments

    def _takes_arguments_as_text(self) -> bool:
        """Return whether the template writes arguments unchanged, found by a trial rendering."""

        def probe(arguments: Any) -> str:
            function = {"name": "probe", "arguments": arguments}
            call = {**_PROBE_CALL, "function": function}
            reply = {"role": "assistant", "content": "", "tool_calls": [call]}
            messages = [*_PROBE_MESSAGES, reply]
            return self._apply(messages, [_PROBE_TOOL], self._template_args, "last_message")

        try:
            return "{'probed'" in probe({"probed": "x"})
        except Exception:  # a template is untrusted code
            pass
        try:
            return "probed" in probe('{"probed": "x"}')
        except Exception:
            return False


def _content(message: ChatMessage, path: str, marks: ImageMarks) -> str:
    """Return the content of ``message`` as text, with ``marks`` for images; ``path`` names it in
    errors."""
    if message.content is None or isinstance(message.content, str):
        return message.content or message.refusal or ""
    texts: list[str] = []
    for index, part in enumerate(message.content):
        if isinstance(part, ImageContent):
            texts.append(marks.add(part.image))
            continue
        param = f"{path}.content[{index}]"
        if part.type not in TEXT_PARTS:
            raise unsupported_content(part.type, param)
        text = part.text if part.type == "text" else part.refusal
        if text is None:
            raise InvalidRequest(f"'{param}' has no {part.type}.", param=f"{param}.{part.type}")
        texts.append(text)
    return "".join(texts)


def _reasoning_key(source: str) -> str:
    """Return the key under which a template expects the reasoning of earlier answers."""
    for name in ("reasoning_content", "reasoning", "thinking"):
        if re.search(rf"""\.{name}\b|['"]{name}['"]""", source):
            return name
    return "reasoning_content"
