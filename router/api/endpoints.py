"""`/v1/chat/completions` and `/v1/completions`: from the body to the answer."""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, ClassVar, Generic, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router.api.answers import DONE, AnswerWriter, ChatShape, CompletionWriter, Shape, TextShape
from router.api.body import read_json_body
from router.api.streaming import EventStream
from router.errors import ApiError, ContextExceeded, ErrorBody, InvalidRequest
from router.fleet.core import Router
from router.fleet.engines import Model
from router.generation.cachedebug import explain
from router.generation.choice import Piece
from router.generation.generation import Generation
from router.schemas.objects import ChatCompletion, ChatCompletionChunk, TextCompletion
from router.schemas.schemas import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    RequestBody,
    parse,
)
from router.tokens.replies import AskedCalls
from router.tokens.reply import PlainReply, ReplyParser
from shared.wire import Grammar

_Body = TypeVar("_Body", bound=RequestBody)
_Request = TypeVar("_Request", bound=GenerationRequest)


class GenerationEndpoint(ABC, Generic[_Body, _Request]):
    """An ASGI application that answers one kind of request, streaming or not.

    ``kind`` is its body, which is understood as a ``_Request``. ``answer`` is what a whole
    answer is, ``event`` what the data of a stream's events are but for ``last_data``,
    ``error_body`` what tells of errors in either; ``example`` is a body. The API's
    description is made of these.
    """

    kind: type[_Body]
    answer: ClassVar[Any]
    event: ClassVar[Any]
    last_data: ClassVar[str | None] = None
    error_body: ClassVar[Any] = ErrorBody
    example: ClassVar[Mapping[str, Any]]
    prompt_field: ClassVar[str]
    """What a prompt that is too long is blamed on."""
    field_names: ClassVar[Mapping[str, str]] = {}
    """What errors call the fields of ``_Request``, where ``kind`` calls them otherwise."""

    def __init__(self, router: Router) -> None:
        self._router = router

    @abstractmethod
    def request(self, body: _Body) -> _Request:
        """What ``body`` asks for. Raises `InvalidRequest`."""

    @abstractmethod
    def writer(self, body: _Body, model: Model) -> AnswerWriter:
        """What answers ``body``."""

    @abstractmethod
    async def prompts(
        self, request: _Request, model: Model, scope: str | None = None
    ) -> list[list[int]]:
        """The token ids of the prompts in ``request``; in a ``scope`` they go on from what
        is known there. Raises `InvalidRequest`."""

    def reply(self, request: _Request, model: Model, prompt: list[int]) -> ReplyParser:
        """What takes a reply to ``prompt`` apart."""
        return PlainReply()

    def grammar(self, request: _Request, model: Model, prompt: list[int]) -> Grammar | None:
        """What a reply to ``prompt`` is bound to. Raises `InvalidRequest`."""
        return request.grammar

    def max_tokens(self, request: _Request) -> int | None:
        return request.max_tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._answer(scope, receive, send)
        except ApiError as error:
            error.rename(self.field_names)
            raise

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        router = self._router
        http = Request(scope, receive)
        body = parse(await read_json_body(http, router.settings.max_request_bytes), self.kind)
        request = self.request(body)
        model = router.model_for(request.model)
        writer = self.writer(body, model)
        key = scope["state"].get("api_key", "")
        with router.admission.request(), Generation(router, model, key) as generation:
            async with _watched(receive, generation):
                await self._submit(generation, request, writer.id)
                await generation.accepted()
                headers = [(b"x-seed", str(generation.seed).encode())]
                if http.headers.get("x-debug-cache", "") not in ("", "0"):
                    headers.append((b"x-debug-cache", await explain(generation)))
                if request.stream:
                    timeout_s = router.settings.request_timeout_s
                    stream = EventStream(generation, writer, send, write_timeout_s=timeout_s)
                    await stream.run(headers)
                    return
                answer = await _whole(generation, writer)
            response = Response(answer, media_type="application/json")
            response.raw_headers += headers
            await response(scope, receive, send)

    async def _submit(self, generation: Generation, request: _Request, answer_id: str) -> None:
        model = generation.model
        if model.renderer is None:
            raise self._router.not_ready(model)
        try:
            scope = generation.scope = f"{generation.key}/{request.cache_salt or ''}"
            prompts = await self.prompts(request, model, scope)
            generation.submit(
                request,
                prompts,
                self.max_tokens(request),
                answer_id,
                reply=lambda prompt: self.reply(request, model, prompt),
                grammar=lambda prompt: self.grammar(request, model, prompt),
            )
        except ContextExceeded as error:
            error.param = self.prompt_field
            raise


class ChatEndpoint(GenerationEndpoint[_Body, ChatRequest]):
    """Whatever API a conversation comes by: its body is understood as a `ChatRequest`."""

    prompt_field = "messages"

    def max_tokens(self, request: ChatRequest) -> int | None:
        return request.max_completion_tokens or request.max_tokens

    async def prompts(
        self, request: ChatRequest, model: Model, scope: str | None = None
    ) -> list[list[int]]:
        assert model.renderer is not None  # `_submit` has seen it
        return [
            await model.renderer.render_chat(
                request.messages,
                request.told_tools,
                request.template_args,
                scope,
                ending=request.prompt_ending,
            )
        ]

    def reply(self, request: ChatRequest, model: Model, prompt: list[int]) -> ReplyParser:
        assert model.renderer is not None
        return model.renderer.replies.parser(prompt, _asked(request))

    def grammar(self, request: ChatRequest, model: Model, prompt: list[int]) -> Grammar | None:
        assert model.renderer is not None
        return model.renderer.replies.grammar(prompt, _asked(request), request.grammar)


class ChatCompletions(ChatEndpoint[ChatRequest]):
    kind = ChatRequest
    answer = ChatCompletion
    event = ChatCompletionChunk
    last_data = DONE
    example: ClassVar = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 32}

    def request(self, body: ChatRequest) -> ChatRequest:
        return body

    def writer(self, body: ChatRequest, model: Model) -> AnswerWriter:
        return _completion_writer(ChatShape(), body, model)


class Completions(GenerationEndpoint[CompletionRequest, CompletionRequest]):
    kind = CompletionRequest
    answer = event = TextCompletion
    last_data = DONE
    example: ClassVar = {"prompt": "Once upon a time", "max_tokens": 32}
    prompt_field = "prompt"

    def request(self, body: CompletionRequest) -> CompletionRequest:
        return body

    def writer(self, body: CompletionRequest, model: Model) -> AnswerWriter:
        return _completion_writer(TextShape(), body, model)

    async def prompts(
        self, request: CompletionRequest, model: Model, scope: str | None = None
    ) -> list[list[int]]:
        assert model.renderer is not None  # `_submit` has seen it
        found: list[list[int]] = []
        for prompt in request.prompts:
            if isinstance(prompt, str):
                found.append(await model.renderer.encode(prompt))
            elif any(token >= model.hello.vocab_size for token in prompt):
                raise InvalidRequest(
                    f"'prompt' has a token id over {model.hello.vocab_size - 1}.",
                    param="prompt",
                    code="invalid_value",
                )
            else:
                found.append(prompt)
        return found


def _asked(request: ChatRequest) -> AskedCalls:
    return AskedCalls(
        request.usable_tools,
        must=request.must_call,
        # A tool that is named is called once.
        several=request.parallel_tool_calls is not False and not request.names_tool,
    )


def _completion_writer(
    shape: Shape[Any, Any], body: GenerationRequest, model: Model
) -> AnswerWriter:
    return CompletionWriter(
        shape,
        body.model or model.names[0],
        model.hello.fingerprint,
        usage_event=body.wants_usage_event,
    )


async def _whole(generation: Generation, writer: AnswerWriter) -> bytes:
    pieces: list[list[Piece]] = [[] for _ in generation.choices]
    while True:
        for choice in generation.choices:
            pieces[choice.index].append(generation.advance(choice))
        if generation.finished:
            break
        await generation.news()
    return writer.whole(generation, [Piece.join(each) for each in pieces])


@asynccontextmanager
async def _watched(receive: Receive, generation: Generation) -> AsyncIterator[None]:
    """Abandons ``generation`` as soon as the client closes the connection."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        generation.abandon()

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
