"""`/api/chat` and `/api/generate`, and the table of all endpoints of Ollama's API."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar, TypeVar

from starlette.requests import Request
from starlette.types import Send

from router.api.body import json_response
from router.api.endpoints import ChatEndpoint
from router.api.fim import fim_prompts
from router.api.operations import Operation, generation_operation
from router.api.truncation import truncate_to_fit
from router.errors import InvalidRequest
from router.fleet.engines.engine import Model
from router.fleet.router import Router
from router.generation.sampling import fim_room
from router.ollama import embedding, management, models
from router.ollama.errors import OllamaError
from router.ollama.keeping import keep, load_or_unload
from router.ollama.names import served_name
from router.ollama.objects import OllamaAnswer, OllamaChatAnswer, OllamaGenerateAnswer, OllamaReply
from router.ollama.schemas import OllamaChatRequest, OllamaGenerateRequest, OllamaRequest
from router.ollama.translation import OllamaPrompt, chat_prompt, generate_prompt
from router.ollama.writer import (
    MEDIA_TYPE,
    OllamaChatWriter,
    OllamaGenerateWriter,
    OllamaWriter,
    timestamp,
)
from router.schemas.requests import ChatRequest
from router.tokens.image_prompts import Prompt
from router.tokens.reply_parser import PlainReplyParser, ReplyParser
from router.tokens.tokenization_cache import LengthCheck
from shared.wire import Grammar

_Body = TypeVar("_Body", bound=OllamaRequest)


def operations(router: Router) -> list[Operation]:
    generating = partial(generation_operation, tag="Ollama")
    return [
        generating("/api/chat", OllamaChat(router), "Answer a conversation"),
        generating("/api/generate", OllamaGenerate(router), "Answer a prompt, or continue it"),
        *embedding.operations(router),
        *models.operations(router),
        *management.operations(router),
    ]


class OllamaEndpoint(ChatEndpoint[_Body]):
    """An endpoint that streams lines of JSON unless told not to."""

    stream_media_type = MEDIA_TYPE
    error_type = OllamaError
    field_names: ClassVar = {
        "response_format.json_schema.schema": "format",
        "response_format": "format",
        "max_tokens": "options.num_predict",
        "logit_bias": "options",
    }

    async def respond_to(self, body: _Body, size: int, http: Request, send: Send) -> None:
        name = served_name(self._router, body.model)
        if body.is_empty:
            reason = await load_or_unload(self._router, body, name, http)
            fields = {"created_at": timestamp(), "done": True, "done_reason": reason}
            answer = self.empty_answer(model=body.model, **fields)
            await json_response(answer)(http.scope, http.receive, send)
            return
        try:
            await super().respond_to(body, size, http, send)
        finally:
            keep(self._router, body, name, http.state.tenant)

    def empty_answer(self, **fields: Any) -> OllamaAnswer:
        raise NotImplementedError

    def max_tokens(self, request: ChatRequest, model: Model) -> int | None:
        """Return the limit on the answer's tokens. Without one, the answer ends at the end of the
        context."""
        limit = model.settings.max_generation_tokens
        return min(request.max_tokens or limit, limit)

    def tokenize_prompts(
        self,
        request: ChatRequest,
        model: Model,
        cache_scope: str | None = None,
        check_length: LengthCheck | None = None,
    ) -> list[Prompt]:
        assert isinstance(request, OllamaPrompt)
        renderer = model.renderer
        if request.needs_thinking and "reasoning" not in renderer.capabilities:
            raise InvalidRequest(f"{model.names[0]} does not support thinking.", param="think")
        if request.raw_prompt is not None and request.raw_suffix is not None:
            room = fim_room(model, request.max_tokens, request.max_context)
            return fim_prompts(model).prompts([request.raw_prompt], request.raw_suffix, room=room)
        if request.raw_prompt is not None:
            return [Prompt.of_text(renderer.encode(request.raw_prompt, check_length=check_length))]
        render = super().tokenize_prompts
        if request.truncate:
            # The last question is kept: it cannot become shorter by itself.
            turns = sum(message.role == "user" for message in request.messages)
            prompts = render(request, model, cache_scope, None if turns > 1 else check_length)
            limit = _longest_prompt(request, model)
            shorter = partial(render, model=model, cache_scope=cache_scope)
            prompts = truncate_to_fit(prompts, request, limit, shorter)
        else:
            prompts = render(request, model, cache_scope, check_length)
        if not request.earlier_tokens:
            return prompts
        if max(request.earlier_tokens) >= model.hello.vocab_size:
            raise InvalidRequest(
                "'context' has token ids that are not in the model's vocabulary.", param="context"
            )
        if renderer.vision and renderer.vision.image_token_id in request.earlier_tokens:
            # Without their embeddings, the model would see something else in place of the images.
            raise InvalidRequest(
                "'context' contains no images, and its prompt had some: send the conversation to "
                "/api/chat.",
                param="context",
            )
        return [prompts[0].after(request.earlier_tokens, renderer)]

    def reply_parser(self, request: ChatRequest, model: Model, prompt: list[int]) -> ReplyParser:
        if _is_raw(request):
            return PlainReplyParser()
        return super().reply_parser(request, model, prompt)

    def grammar(self, request: ChatRequest, model: Model, prompt: list[int]) -> Grammar | None:
        return request.grammar if _is_raw(request) else super().grammar(request, model, prompt)


class OllamaChat(OllamaEndpoint[OllamaChatRequest]):
    body_type = OllamaChatRequest
    response_type = event_type = OllamaChatAnswer
    example: ClassVar = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Say hello."}],
        "options": {"num_predict": 32},
    }

    def translate(self, body: OllamaChatRequest) -> OllamaPrompt:
        return chat_prompt(body, served_name(self._router, body.model))

    def writer(self, body: OllamaChatRequest, model: str) -> OllamaWriter:
        return OllamaChatWriter(body.model)

    def empty_answer(self, **fields: Any) -> OllamaChatAnswer:
        return OllamaChatAnswer(message=OllamaReply(content=""), **fields)


class OllamaGenerate(OllamaEndpoint[OllamaGenerateRequest]):
    body_type = OllamaGenerateRequest
    response_type = event_type = OllamaGenerateAnswer
    example: ClassVar = {
        "model": "tiny",
        "prompt": "Say hello.",
        "options": {"num_predict": 32},
    }
    prompt_field = "prompt"

    def translate(self, body: OllamaGenerateRequest) -> OllamaPrompt:
        return generate_prompt(body, served_name(self._router, body.model))

    def writer(self, body: OllamaGenerateRequest, model: str) -> OllamaWriter:
        return OllamaGenerateWriter(body.model, raw=bool(body.raw or body.suffix))

    def empty_answer(self, **fields: Any) -> OllamaGenerateAnswer:
        return OllamaGenerateAnswer(response="", **fields)


def _is_raw(request: ChatRequest) -> bool:
    return isinstance(request, OllamaPrompt) and request.raw_prompt is not None


def _longest_prompt(request: OllamaPrompt, model: Model) -> int:
    context = min(model.hello.context_length, request.max_context or model.hello.context_length)
    return min(context - 1, model.max_prompt_tokens)
