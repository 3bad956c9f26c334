"""`/v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

from typing import ClassVar

from msgspec.structs import replace
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from router.anthropic.errors import AnthropicErrorResponse
from router.anthropic.objects import AnthropicMessage, MessageStreamEvent, TokenCount
from router.anthropic.schemas import CountTokensRequest, MessagesRequest
from router.anthropic.translation import chat_request, with_notes
from router.anthropic.writer import MessageWriter
from router.api.body import json_response, read_body
from router.api.endpoints import ChatEndpoint, cancel_on_disconnect, loaded_model
from router.api.images import with_images
from router.api.operations import Operation, generation_operation
from router.errors import BODY_ERRORS, MODEL_ERRORS
from router.fleet.router import Router
from router.fleet.tenants.tenant import Tenant
from router.generation.sampling import salt_of
from router.schemas.requests import ChatRequest


def operations(router: Router) -> list[Operation]:
    return [
        generation_operation(
            "/v1/messages", Messages(router), "Answer a conversation", "Anthropic"
        ),
        Operation(
            path="/v1/messages/count_tokens",
            endpoint=CountTokens(router),
            summary="Count the tokens of a conversation",
            tag="Anthropic",
            method="POST",
            body_type=CountTokensRequest,
            example={"messages": [{"role": "user", "content": "Say hello."}]},
            response_type=TokenCount,
            errors=(*BODY_ERRORS, *MODEL_ERRORS),
            error_type=Messages.error_type,
        ),
    ]


class Messages(ChatEndpoint[MessagesRequest]):
    body_type = MessagesRequest
    response_type = AnthropicMessage
    event_type = MessageStreamEvent
    error_type = AnthropicErrorResponse
    example: ClassVar = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 32}
    field_names: ClassVar = {"response_format.json_schema.schema": "output_config.format.schema"}

    def translate(self, body: MessagesRequest) -> ChatRequest:
        return self.chat_request(body)

    def chat_request(self, body: CountTokensRequest) -> ChatRequest:
        """Return the chat request for ``body``. Raises `InvalidRequest`."""
        if self._router.settings.skip_unsupported_content:
            body = with_notes(body)
        return chat_request(body)

    def writer(self, body: MessagesRequest, model: str) -> MessageWriter:
        return MessageWriter(body, model)


class CountTokens:
    """An ASGI application that counts the tokens of a conversation."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._messages = Messages(router)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        router = self._router
        http = Request(scope, receive)
        body, size = await read_body(http, router, CountTokensRequest)
        tenant: Tenant = http.state.tenant
        model = await loaded_model(router, body.model, http)

        async with router.admit(tenant, model, http.state.limits_left):
            request = await router.work.run(
                tenant.share, lambda: self._messages.chat_request(body), size
            )
            salt = salt_of(request, router.settings, tenant)
            async with cancel_on_disconnect(receive):
                messages, size = await with_images(
                    router, request.messages, model, http.state, salt, size
                )
            request = replace(request, messages=messages)
            (prompt,) = await router.work.run(
                tenant.share, lambda: self._messages.tokenize_prompts(request, model), size
            )
        await json_response(TokenCount(len(prompt.token_ids)))(scope, receive, send)
