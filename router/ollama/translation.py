"""Translation of Ollama's requests to `ChatRequest`s."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from router.api.translation import (
    assistant_message,
    joined_content,
    with_paths,
)
from router.ollama.schemas import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaMessage,
    OllamaOptions,
    OllamaRequest,
)
from router.schemas.body import validated
from router.schemas.conversation import (
    PARAGRAPH_BREAK,
    ChatMessage,
    ContentPart,
    FunctionCall,
    ToolCall,
)
from router.schemas.images import SentImage
from router.schemas.requests import ChatRequest, GenerationRequest
from router.schemas.structured import JsonSchemaFormat, ResponseFormat

_LONGEST = 2**31 - 1


class OllamaPrompt(ChatRequest, frozen=True, kw_only=True):
    """A `ChatRequest` with fields that exist only in Ollama's API."""

    context_size: int | None = None
    truncate: bool = False
    """Whether the oldest turns are dropped if the prompt is too long."""
    needs_thinking: bool = False
    """Whether it is an error if the model cannot reason."""
    raw_prompt: str | None = None
    """A prompt used without a template, instead of ``messages``."""
    raw_suffix: str | None = None
    """The text after the answer to ``raw_prompt``."""
    earlier_tokens: tuple[int, ...] = ()
    """The tokens that the prompt continues."""

    @property
    def max_context(self) -> int | None:
        return self.context_size

    @property
    def continues_prompt(self) -> bool:
        return self.raw_prompt is not None or super().continues_prompt

    def check(self) -> None:
        if self.raw_prompt is None:
            super().check()
        else:
            GenerationRequest.check(self)


def chat_prompt(body: OllamaChatRequest, model: str) -> OllamaPrompt:
    """Return the request for ``body`` to the model served as ``model``. Raises `InvalidRequest`
    with the name of the field."""
    messages = list(_messages(body.messages or ()))
    last = messages[-1]
    return validated(
        OllamaPrompt(
            **_fields(body, model),
            messages=messages,
            tools=body.tools,
            continue_final_message=last.role == "assistant" and not last.tool_calls,
            truncate=body.truncate is not False,
        )
    )


def generate_prompt(body: OllamaGenerateRequest, model: str) -> OllamaPrompt:
    """Return the request for a single prompt."""
    messages = [ChatMessage("system", body.system)] if body.system else []
    content = _content(body.prompt, body.images, "images")
    return validated(
        OllamaPrompt(
            **_fields(body, model),
            messages=[*messages, ChatMessage("user", content)],
            raw_prompt=body.prompt if body.raw or body.suffix else None,
            raw_suffix=body.suffix or None,
            earlier_tokens=tuple(body.context or ()),
        )
    )


def _fields(body: OllamaRequest, model: str) -> dict[str, Any]:
    return {
        "model": model,
        "stream": body.stream is not False,
        "response_format": _response_format(body.format),
        "logprobs": body.logprobs,
        "top_logprobs": body.top_logprobs if body.logprobs else None,
        "needs_thinking": bool(body.think),
        **_thinking(body.think),
        **_options(body.options or OllamaOptions()),
    }


def _response_format(format: str | dict[str, Any] | None) -> ResponseFormat | None:
    if not format:
        return None
    if isinstance(format, str):
        return ResponseFormat(type="json_object")
    return ResponseFormat(type="json_schema", json_schema=JsonSchemaFormat(schema=format))


def _thinking(think: bool | str | None) -> dict[str, Any]:
    if isinstance(think, str):
        # No template supports a higher level.
        effort = "high" if think == "max" else think
        return {"enable_thinking": True, "reasoning_effort": effort}
    return {"enable_thinking": think}


def _options(options: OllamaOptions) -> dict[str, Any]:
    most, context, seed = _whole(options.num_predict), _whole(options.num_ctx), _whole(options.seed)
    last_n, penalty = _whole(options.repeat_last_n), options.repeat_penalty
    return {
        "max_tokens": most if most and most > 0 else None,
        "context_size": context or None,
        "seed": None if seed is not None and seed < 0 else seed,
        "stop": options.stop or None,
        "temperature": options.temperature,
        "top_k": _whole(options.top_k),
        "top_p": options.top_p,
        "min_p": options.min_p,
        "repetition_penalty": None if last_n == 0 else penalty,
        "repetition_context_size": _LONGEST if last_n == -1 else last_n or 64,
        "presence_penalty": options.presence_penalty,
        "frequency_penalty": options.frequency_penalty,
        "ignore_eos": options.ignore_eos,
    }


def _whole(number: float | None) -> int | None:
    return None if number is None else int(number)


# -- messages ------------------------------------------------------------------


def _messages(given: Sequence[OllamaMessage]) -> Iterator[ChatMessage]:
    for path, message in with_paths(given, "messages"):
        text = message.content or ""
        content = _content(text, message.images, f"{path}.images")
        match message.role:
            case "assistant":
                calls = [
                    ToolCall(FunctionCall(call.function.name, call.function.arguments), id=call.id)
                    for call in message.tool_calls or ()
                ]
                yield assistant_message([text], [message.thinking or ""], calls)
            case "tool":
                yield ChatMessage(
                    "tool", content, name=message.tool_name, tool_call_id=message.tool_call_id
                )
            case role:
                yield ChatMessage(role, content)


def _content(text: str, images: list[str] | None, path: str) -> str | list[ContentPart]:
    """Return the content of a message: images first, then the text."""
    sent = [
        SentImage(type="image", source=image, is_url=False, path=image_path)
        for image_path, image in with_paths(images or (), path)
    ]
    return joined_content([*sent, text], PARAGRAPH_BREAK)
