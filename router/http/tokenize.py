"""`/tokenize` and `/detokenize`, as vLLM has them."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from router.api.body import read_json_body
from router.errors import InvalidRequest
from router.fleet.engines import Model
from router.fleet.router import Router
from router.schemas.conversation import MAX_TOOLS, ChatMessage, PromptEnding, Tool, prompt_ending
from router.schemas.requests import RequestBody, TokenId, parse_body
from router.tokens.rendering import Renderer


class TokenizeRequest(RequestBody, frozen=True, kw_only=True):
    """A text (``prompt``) or a conversation (``messages``), one of both.

    ``add_special_tokens`` puts those before it that the model begins with: by default
    before a text, and not before a conversation, whose template has them.
    """

    model: Annotated[str, Meta(max_length=512)] | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    chat_template: Any = None
    mm_processor_kwargs: Any = None

    def check(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("One of 'prompt' and 'messages' is needed.", param="prompt")
        _ = self.prompt_ending

    @property
    def prompt_ending(self) -> PromptEnding:
        return prompt_ending(self.messages, self.add_generation_prompt, self.continue_final_message)


class TokenizeResponse(Struct, frozen=True, kw_only=True):
    """``max_model_len`` is the model's context. ``token_strs`` are the tokens as the
    vocabulary has them, where they were asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeRequest(RequestBody, frozen=True, kw_only=True):
    model: Annotated[str, Meta(max_length=512)] | None = None
    tokens: list[TokenId]


class DetokenizeResponse(Struct, frozen=True, kw_only=True):
    prompt: str


async def tokenize(http: Request) -> Response:
    router: Router = http.app.state.router
    request = await _body(http, router, TokenizeRequest)
    model, renderer = _ready_model(router, request.model)
    with router.admission.limit_concurrency():
        if request.messages is None:
            special = True if request.add_special_tokens is None else request.add_special_tokens
            tokens = await renderer.encode(request.prompt or "", add_special_tokens=special)
        else:
            tokens = await renderer.render_chat(
                request.messages,
                request.tools or (),
                request.chat_template_kwargs or {},
                ending=request.prompt_ending,
                add_special_tokens=bool(request.add_special_tokens),
            )
        texts = await renderer.token_strings(tokens) if request.return_token_strs else None
    return _json(
        TokenizeResponse(
            count=len(tokens),
            max_model_len=model.hello.context_length,
            tokens=tokens,
            token_strs=texts,
        )
    )


async def detokenize(http: Request) -> Response:
    router: Router = http.app.state.router
    request = await _body(http, router, DetokenizeRequest)
    model, renderer = _ready_model(router, request.model)
    over = next((i for i, t in enumerate(request.tokens) if t >= model.hello.vocab_size), None)
    if over is not None:
        raise InvalidRequest(
            f"'tokens[{over}]' is over {model.hello.vocab_size - 1}, the model's last token id.",
            param=f"tokens[{over}]",
            code="invalid_value",
        )
    with router.admission.limit_concurrency():
        return _json(DetokenizeResponse(prompt=await renderer.decode(request.tokens)))


_Body = TypeVar("_Body", bound=RequestBody)


async def _body(http: Request, router: Router, kind: type[_Body]) -> _Body:
    return parse_body(await read_json_body(http, router.settings.max_request_bytes), kind)


def _ready_model(router: Router, name: str | None) -> tuple[Model, Renderer]:
    model = router.model_for(name)
    if model.renderer is None:
        raise router.not_ready(model)
    return model, model.renderer


def _json(answer: Struct) -> Response:
    return Response(msgspec.json.encode(answer), media_type="application/json")
