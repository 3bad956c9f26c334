"""`/tokenize` and `/detokenize`, as in vLLM."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from router.api.body import json_response, read_body
from router.api.endpoints import cancel_on_disconnect, loaded_model
from router.api.images import with_images
from router.api.operations import Operation
from router.api.translation import with_sent_images
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


async def tokenize(http: Request) -> Response:
    router: Router = http.app.state.router
    request, size = await read_body(http, router, TokenizeRequest)
    tenant: Tenant = http.state.tenant
    model = await loaded_model(router, request.model, http)
    async with router.admit(tenant, model, http.state.limits_left):
        messages: list[ChatMessage] = []
        if request.messages is not None:
            salt = f"{tenant.name}/" if router.settings.cache_salt_per_key else ""
            given = request.messages
            sent = await router.work.run_large(tenant.name, lambda: with_sent_images(given), size)
            async with cancel_on_disconnect(http.receive):
                messages, size = await with_images(router, sent, model, http.state, salt, size)
        work = partial(_tokenized, request, messages, model)
        return await router.work.run(tenant.name, work, size)


def _tokenized(request: TokenizeRequest, messages: list[ChatMessage], model: Model) -> Response:
    renderer, special = model.renderer, request.add_special_tokens
    if request.messages is None:
        tokens = renderer.encode(request.prompt or "", add_special_tokens=special is not False)
    else:
        tokens = renderer.render_chat(
            messages,
            request.tools or (),
            request.chat_template_kwargs or {},
            ending=request.prompt_ending,
            add_special_tokens=bool(special),
        ).token_ids
    texts = renderer.token_strings(tokens) if request.return_token_strs else None
    context = model.hello.context_length
    return json_response(
        TokenizeResponse(count=len(tokens), max_model_len=context, tokens=tokens, token_strs=texts)
    )


async def detokenize(http: Request) -> Response:
    router: Router = http.app.state.router
    request, size = await read_body(http, router, DetokenizeRequest)
    tenant: Tenant = http.state.tenant
    model = await loaded_model(router, request.model, http)
    async with router.admit(tenant, model, http.state.limits_left):
        return await router.work.run(tenant.name, lambda: _detokenized(request, model), size)


def _detokenized(request: DetokenizeRequest, model: Model) -> Response:
    if max(request.tokens, default=0) >= model.hello.vocab_size:
        over = next(i for i, t in enumerate(request.tokens) if t >= model.hello.vocab_size)
        raise InvalidValue(
            f"'tokens[{over}]' is greater than {model.hello.vocab_size - 1}, the model's last "
            "token id.",
            param=f"tokens[{over}]",
        )
    return json_response(DetokenizeResponse(prompt=model.renderer.decode(request.tokens)))


_operation = partial(Operation, tag="Tokens", method="POST", errors=(*BODY_ERRORS, *MODEL_ERRORS))
OPERATIONS = (
    _operation(
        path="/tokenize",
        endpoint=tokenize,
        summary="Tokenize a text or a conversation",
        body_type=TokenizeRequest,
        example={"prompt": "Hello", "return_token_strs": True},
        response_type=TokenizeResponse,
    ),
    _operation(
        path="/detokenize",
        endpoint=detokenize,
        summary="Convert token ids to text",
        body_type=DetokenizeRequest,
        example={"tokens": [1, 2, 3]},
        response_type=DetokenizeResponse,
    ),
)
