"""`/v1/chat/completions` and `/v1/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from msgspec.structs import replace
from starlette.requests import Request
from starlette.types import Send

from router.api.endpoints import ChatEndpoint, GenerationEndpoint
from router.api.fim import fim_prompts
from router.api.operations import Operation, generation_operation
from router.api.translation import content_note, with_sent_images
from router.errors import ApiError, InvalidValue
from router.fleet.engines.engine import Model
from router.fleet.router import Router
from router.generation.sampling import fim_room
from router.openai.fim import FimCompletions
from router.openai.writer import DONE, ChatCompletionWriter, TextCompletionWriter
from router.schemas.completions import ChatCompletion, ChatCompletionChunk, TextCompletion
from router.schemas.conversation import TEXT_PARTS, ChatMessage, ContentPart
from router.schemas.requests import ChatRequest, CompletionRequest
from router.tokens.image_prompts import Prompt
from router.tokens.tokenization_cache import LengthCheck


def operations(router: Router) -> list[Operation]:
    chat, text, fim = ChatCompletions(router), Completions(router), FimCompletions(router)
    return [
        generation_operation("/v1/chat/completions", chat, "Answer a conversation", "OpenAI"),
        generation_operation("/v1/completions", text, "Continue a text", "OpenAI"),
        *(
            generation_operation(path, fim, "Fill a gap in a text", "Mistral")
            for path in ("/v1/fim/completions", "/fim/completions")
        ),
    ]


class ChatCompletions(ChatEndpoint[ChatRequest]):
    body_type = ChatRequest
    response_type = ChatCompletion
    event_type = ChatCompletionChunk
    stream_terminator = DONE
    example: ClassVar = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 32}

    def translate(self, body: ChatRequest) -> ChatRequest:
        messages: Sequence[ChatMessage] = body.messages
        if self._router.settings.skip_unsupported_content:
            messages = [_with_notes(message) for message in messages]
        return replace(body, messages=with_sent_images(messages))

    def writer(self, body: ChatRequest, model: str) -> ChatCompletionWriter:
        return ChatCompletionWriter(body, model)

    async def respond_to(self, body: ChatRequest, size: int, http: Request, send: Send) -> None:
        try:
            await super().respond_to(body, size, http, send)
        except ApiError as error:
            if body.max_completion_tokens:
                error.rename_fields({"max_tokens": "max_completion_tokens"})
            raise


def _with_notes(message: ChatMessage) -> ChatMessage:
    """Return ``message`` with a note in place of each unsupported part."""
    if not isinstance(message.content, list):
        return message
    parts = [
        part
        if part.type in (*TEXT_PARTS, "image_url")
        else ContentPart("text", content_note(part.type))
        for part in message.content
    ]
    return replace(message, content=parts)


class Completions(GenerationEndpoint[CompletionRequest, CompletionRequest]):
    body_type = CompletionRequest
    response_type = event_type = TextCompletion
    stream_terminator = DONE
    example: ClassVar = {"prompt": "Once upon a time", "max_tokens": 32}
    prompt_field = "prompt"

    def translate(self, body: CompletionRequest) -> CompletionRequest:
        return body

    def writer(self, body: CompletionRequest, model: str) -> TextCompletionWriter:
        return TextCompletionWriter(body, model)

    def num_prompts(self, request: CompletionRequest) -> int:
        # This runs on the event loop, and there may be many token ids: nothing is copied.
        prompt = request.prompt
        return 1 if isinstance(prompt, str) or isinstance(prompt[0], int) else len(prompt)

    def tokenize_prompts(
        self,
        request: CompletionRequest,
        model: Model,
        cache_scope: str | None = None,
        check_length: LengthCheck | None = None,
    ) -> list[Prompt]:
        prompts = request.prompts
        for prompt in prompts:
            if not isinstance(prompt, str):
                _check_token_ids(prompt, model)
        if request.suffix:
            room = fim_room(model, request.max_tokens)
            return fim_prompts(model).prompts(prompts, request.suffix, room=room)
        found: list[list[int]] = []
        for prompt in prompts:
            if isinstance(prompt, str):
                special = request.add_special_tokens is not False
                found.append(
                    model.renderer.encode(
                        prompt, add_special_tokens=special, check_length=check_length
                    )
                )
            else:
                found.append(prompt)
        return [Prompt.of_text(tokens) for tokens in found]


def _check_token_ids(prompt: list[int], model: Model) -> None:
    most = model.hello.vocab_size - 1
    if any(token > most for token in prompt):
        raise InvalidValue(f"'prompt' contains a token id greater than {most}.", param="prompt")
