"""`/api/embed`, and its predecessor `/api/embeddings`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from functools import partial

import msgspec
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from router.api.body import read_body, send_json
from router.api.endpoints import cancel_on_disconnect
from router.api.operations import Operation
from router.encoding.embedding import embed_texts, numbered, text_model
from router.encoding.encoding import Caller, EncodedTexts
from router.errors import BODY_ERRORS, MODEL_ERRORS, EngineLost, GenerationTimeout
from router.fleet.engines.engine import Model
from router.fleet.router import Router
from router.fleet.sequences.remote_texts import Rows
from router.ollama.errors import OllamaError
from router.ollama.keeping import keep
from router.ollama.names import served_name
from router.ollama.objects import OllamaEmbedding, OllamaEmbeddings
from router.ollama.schemas import OllamaEmbeddingRequest, OllamaEmbedRequest

_Body = OllamaEmbedRequest | OllamaEmbeddingRequest


class OllamaEmbed:
    """An ASGI application. Texts that are too long are truncated unless the request disables it."""

    def __init__(
        self, router: Router, body_type: type[OllamaEmbedRequest] | type[OllamaEmbeddingRequest]
    ) -> None:
        self._router, self._body_type = router, body_type

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        router, http, state = self._router, Request(scope, receive), scope["state"]
        body: _Body
        body, size = await read_body(http, router, self._body_type)
        name = served_name(router, body.model)
        caller = Caller(
            tenant=state["tenant"],
            traceparent=state.get("traceparent", ""),
            limits_left=state["limits_left"],
        )
        began = time.monotonic()
        async with cancel_on_disconnect(receive):
            model = await text_model(router, name, caller, "embed")
            load_s = time.monotonic() - began
            async with contextlib.AsyncExitStack() as stack:
                found = None
                if body.texts:
                    admitted = router.admit(caller.tenant, model, caller.limits_left)
                    await stack.enter_async_context(admitted)
                    found = await self._embed(model, caller, body, size)
                keep(router, body, name, caller.tenant)
                tokens = 0 if found is None else found.num_tokens
                state["audit"] = {
                    "model": model.names[0],
                    "prompt_tokens": tokens,
                    "texts": len(body.texts),
                }
                figures = OllamaEmbeddings(
                    model=body.model,
                    embeddings=[],
                    total_duration=int((time.monotonic() - began) * 1e9),
                    load_duration=int(load_s * 1e9),
                    prompt_eval_count=tokens,
                )
                written = partial(_written, body, found, figures)
                numbers = 0 if found is None else found.rows.size
                pieces = await router.work.run(
                    caller.tenant.share, lambda: list(written()), numbers * 4
                )
                # Within the limit of concurrent requests, because it is large.
                await send_json(send, pieces, ())

    async def _embed(self, model: Model, caller: Caller, body: _Body, size: int) -> EncodedTexts:
        return await embed_texts(
            self._router,
            model,
            caller,
            body.texts,
            name_of=lambda number: numbered(body.texts_field, number, len(body.texts)),
            dimensions=body.dimensions,
            truncate=body.truncate is not False,
            size=size,
        )


def _written(body: _Body, found: EncodedTexts | None, figures: OllamaEmbeddings) -> Iterator[bytes]:
    """Yield the answer's JSON one text at a time: formatting all numbers at once would take several
    times their size."""
    rows: Iterable[Rows] = () if found is None else found.rows
    if isinstance(body, OllamaEmbeddingRequest):
        yield msgspec.json.encode(
            OllamaEmbedding([number for row in rows for number in row.tolist()])
        )
        return
    before, after = msgspec.json.encode(figures).split(b'"embeddings":[]', 1)
    yield before + b'"embeddings":['
    for index, row in enumerate(rows):
        yield (b"," if index else b"") + msgspec.json.encode(row.tolist())
    yield b"]" + after


def operations(router: Router) -> list[Operation]:
    described = partial(
        Operation,
        tag="Ollama",
        method="POST",
        error_type=OllamaError,
        errors=(*BODY_ERRORS, *MODEL_ERRORS, EngineLost, GenerationTimeout),
    )
    return [
        described(
            "/api/embed",
            OllamaEmbed(router, OllamaEmbedRequest),
            "The vectors of texts",
            body_type=OllamaEmbedRequest,
            example={"model": "tiny", "input": ["A text.", "Another."]},
            response_type=OllamaEmbeddings,
        ),
        described(
            "/api/embeddings",
            OllamaEmbed(router, OllamaEmbeddingRequest),
            "The vector of a text",
            body_type=OllamaEmbeddingRequest,
            example={"model": "tiny", "prompt": "A text."},
            response_type=OllamaEmbedding,
        ),
    ]
