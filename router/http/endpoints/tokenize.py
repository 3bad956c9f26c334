"""`/tokenize` and `/detokenize`, as in vLLM."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial
from typing import Annotated, Any, Generic, TypeVar

import msgspec
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from router.api.body import read_body, send_json
from router.api.endpoints import cancel_on_disconnect, loaded_model
from router.api.images import with_images
from router.api.operations import Operation
from router.api.translation import with_sent_images, without_billing
from router.errors import BODY_ERRORS, MODEL_ERRORS, InvalidRequest, InvalidValue
from router.fleet.engines.engine import Model
from router.fleet.router import Router
from router.fleet.tenants.tenant import Tenant
from router.schemas.body import RequestBody, TokenId, refused
from router.schemas.conversation import (
    MAX_TOOLS,
    ChatMessage,
    PromptEnding,
    Tool,
    image_chars,
    prompt_ending,
)


class TokenizeRequest(RequestBody, frozen=True, kw_only=True):
    """Either a text (``prompt``) or a conversation (``messages``)."""

    may_have_images = True

    model: Annotated[str, Meta(max_length=512)] | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: Annotated[
        bool | None,
        Meta(
            description="Add the special tokens that the model begins with (default: true for a "
            "text, false for a conversation, whose template includes them)."
        ),
    ] = None
    return_token_strs: bool | None = None

    chat_template: Annotated[Any, refused("", advice="Use '--chat-template'.")] = None
    media_io_kwargs: Annotated[Any, refused({})] = None
    mm_processor_kwargs: Annotated[Any, refused({})] = None

    @property
    def image_chars(self) -> int:
        return image_chars(self.messages or ())

    def check(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("One of 'prompt' and 'messages' is required.", param="prompt")
        _ = self.prompt_ending

    @property
    def prompt_ending(self) -> PromptEnding:
        return prompt_ending(self.messages, self.add_generation_prompt, self.continue_final_message)


class TokenizeResponse(Struct, frozen=True, kw_only=True):
    count: int
    max_model_len: Annotated[int, Meta(description="The model's context, in tokens.")]
    tokens: list[int]
    token_strs: Annotated[
        list[str] | None,
        Meta(description="The tokens as in the vocabulary; null if not requested."),
    ]


class DetokenizeRequest(RequestBody, frozen=True, kw_only=True):
    model: Annotated[str, Meta(max_length=512)] | None = None
    tokens: list[TokenId]


class DetokenizeResponse(Struct, frozen=True, kw_only=True):
    prompt: str


_Body = TypeVar("_Body", TokenizeRequest, DetokenizeRequest)


class TokenEndpoint(ABC, Generic[_Body]):
    """An ASGI application."""

    body_type: type[_Body]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        http = Request(scope, receive)
        router: Router = http.app.state.router
        body, size = await read_body(http, router, self.body_type)
        model = await loaded_model(router, body.model, http)
        async with router.admit(http.state.tenant, model, http.state.limits_left):
            answer = await self._answer(body, size, model, http)
            # Within the limit of concurrent requests, because it may be many times as large as
            # the body.
            await send_json(send, [answer], ())

    @abstractmethod
    async def _answer(self, body: _Body, size: int, model: Model, http: Request) -> bytes:
        """Return the answer in JSON. ``size`` is that of ``body``, in bytes. Raises `ApiError` and
        `ClientDisconnected`."""


class Tokenize(TokenEndpoint[TokenizeRequest]):
    body_type = TokenizeRequest

    async def _answer(self, body: TokenizeRequest, size: int, model: Model, http: Request) -> bytes:
        router: Router = http.app.state.router
        tenant: Tenant = http.state.tenant
        messages: list[ChatMessage] = []
        if body.messages is not None:
            salt = f"{tenant.name}/" if router.settings.cache_salt_per_key else ""
            given = body.messages
            sent = await router.work.run_large(tenant.share, lambda: with_sent_images(given), size)
            async with cancel_on_disconnect(http.receive):
                messages, size = await with_images(router, sent, model, http.state, salt, size)
        return await router.work.run(tenant.share, partial(_tokenized, body, messages, model), size)


def _tokenized(request: TokenizeRequest, messages: list[ChatMessage], model: Model) -> bytes:
    renderer, special = model.renderer, request.add_special_tokens
    if request.messages is None:
        tokens = renderer.encode(request.prompt or "", add_special_tokens=special is not False)
    else:
        tokens = renderer.render_chat(
            without_billing(messages),
            request.tools or (),
            request.chat_template_kwargs or {},
            ending=request.prompt_ending,
            add_special_tokens=bool(special),
        ).token_ids
    texts = renderer.token_strings(tokens) if request.return_token_strs else None
    context = model.hello.context_length
    return msgspec.json.encode(
        TokenizeResponse(count=len(tokens), max_model_len=context, tokens=tokens, token_strs=texts)
    )


class Detokenize(TokenEndpoint[DetokenizeRequest]):
    body_type = DetokenizeRequest

    async def _answer(
        self, body: DetokenizeRequest, size: int, model: Model, http: Request
    ) -> bytes:
        router: Router = http.app.state.router
        return await router.work.run(
            http.state.tenant.share, partial(_detokenized, body, model), size
        )


def _detokenized(request: DetokenizeRequest, model: Model) -> bytes:
    if max(request.tokens, default=0) >= model.hello.vocab_size:
        over = next(i for i, t in enumerate(request.tokens) if t >= model.hello.vocab_size)
        raise InvalidValue(
            f"'tokens[{over}]' is greater than {model.hello.vocab_size - 1}, the model's last "
            "token id.",
            param=f"tokens[{over}]",
        )
    return msgspec.json.encode(DetokenizeResponse(prompt=model.renderer.decode(request.tokens)))


_operation = partial(Operation, tag="Tokens", method="POST", errors=(*BODY_ERRORS, *MODEL_ERRORS))
OPERATIONS = (
    _operation(
        path="/tokenize",
        endpoint=Tokenize(),
        summary="Tokenize a text or a conversation",
        body_type=TokenizeRequest,
        example={"prompt": "Hello", "return_token_strs": True},
        response_type=TokenizeResponse,
    ),
    _operation(
        path="/detokenize",
        endpoint=Detokenize(),
        summary="Convert token ids to text",
        body_type=DetokenizeRequest,
        example={"tokens": [1, 2, 3]},
        response_type=DetokenizeResponse,
    ),
)
