"""`/v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

from typing import ClassVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router.anthropic.answers import MessageWriter
from router.anthropic.errors import ErrorBody
from router.anthropic.schemas import (
    CountTokensRequest,
    Event,
    Message,
    MessagesRequest,
    TokenCount,
)
from router.anthropic.translation import chat_request
from router.api.body import read_json_body
from router.api.endpoints import ChatEndpoint
from router.fleet.core import Router
from router.fleet.engines import Model
from router.schemas.schemas import ChatRequest, parse


class Messages(ChatEndpoint[MessagesRequest]):
    kind = MessagesRequest
    answer = Message
    event = Event
    error_body = ErrorBody
    example: ClassVar = {
        "messages": [{"role": "user", "content": "Say hello."}],
        "max_tokens": 32,
    }
    field_names: ClassVar = {"response_format.json_schema.schema": "output_config.format.schema"}

    def request(self, body: MessagesRequest) -> ChatRequest:
        return chat_request(body)

    def writer(self, body: MessagesRequest, model: Model) -> MessageWriter:
        return MessageWriter(
            body.model or model.names[0],
            body.max_tokens,
            show_thinking=body.thinking is None or body.thinking.display != "omitted",
        )


class CountTokens:
    """An ASGI application that says how many tokens a conversation has."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._messages = Messages(router)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        router = self._router
        raw = await read_json_body(Request(scope, receive), router.settings.max_request_bytes)
        request = chat_request(parse(raw, CountTokensRequest))
        model = router.model_for(request.model)
        if model.renderer is None:
            raise router.not_ready(model)
        (prompt,) = await self._messages.prompts(request, model)
        answer = msgspec.json.encode(TokenCount(len(prompt)))
        await Response(answer, media_type="application/json")(scope, receive, send)
