"""`/v1/embeddings`."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from router.api.body import read_body, send_json
from router.api.endpoints import cancel_on_disconnect
from router.api.operations import Operation
from router.encoding.embedding import MAX_TEXTS, embed_texts, numbered, text_model
from router.encoding.encoding import Caller, EncodedTexts
from router.errors import (
    BODY_ERRORS,
    MODEL_ERRORS,
    EngineLost,
    GenerationTimeout,
    InvalidRequest,
    InvalidValue,
)
from router.fleet.engines.engine import Model
from router.fleet.router import Router
from router.fleet.sequences.remote_texts import Rows
from router.schemas.body import RequestBody, TokenId, refused

_PROMPT = "Use 'prompt_name'."

EncodingFormat = Literal["float", "base64"]


class EmbeddingRequest(RequestBody, frozen=True, kw_only=True):
    model: Annotated[str, Meta(max_length=512)] | None = None
    input: Annotated[
        str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)],
        Meta(
            description=f"A text, up to {MAX_TEXTS} texts, the token ids of a text, or up to "
            f"{MAX_TEXTS} lists of token ids."
        ),
    ]
    encoding_format: EncodingFormat | None = None
    dimensions: (
        Annotated[
            int,
            Meta(
                ge=1,
                le=2**31 - 1,
                description="Number of dimensions to keep of each vector, normalized to length "
                "1 again.",
            ),
        ]
        | None
    ) = None
    user: str | None = None
    prompt_name: (
        Annotated[
            str,
            Meta(
                max_length=512,
                description="Name of the checkpoint's prompt to put before each text, such as "
                "`query`.",
            ),
        ]
        | None
    ) = None
    truncate: Annotated[
        bool | None, Meta(description="Truncate texts that are too long instead of rejecting them.")
    ] = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None

    # Of vLLM, SGLang, llama.cpp, text-embeddings-inference, Jina, Voyage and Cohere.
    input_type: Annotated[Any, refused(advice=_PROMPT)] = None
    task: Annotated[Any, refused(advice=_PROMPT)] = None
    instruction: Annotated[Any, refused("", advice=_PROMPT)] = None
    output_dimension: Annotated[Any, refused(advice="Use 'dimensions'.")] = None
    output_dtype: Annotated[Any, refused("float")] = None
    embedding_type: Annotated[Any, refused("float", advice="Use 'encoding_format'.")] = None
    embedding_types: Annotated[Any, refused(["float"], advice="Use 'encoding_format'.")] = None
    embed_dtype: Annotated[Any, refused("float32")] = None
    endianness: Annotated[Any, refused("native", "little")] = None
    normalize: Annotated[Any, refused(True)] = None
    normalized: Annotated[Any, refused(True)] = None
    embd_normalize: Annotated[Any, refused(2)] = None
    use_activation: Annotated[Any, refused(True)] = None
    late_chunking: Annotated[Any, refused(False)] = None
    add_special_tokens: Annotated[Any, refused(True)] = None
    truncation: Annotated[Any, refused(False, advice="Use 'truncate'.")] = None
    truncate_prompt_tokens: Annotated[Any, refused(advice="Use 'truncate'.")] = None
    truncation_side: Annotated[Any, refused("right")] = None
    truncation_direction: Annotated[Any, refused("Right", "right")] = None
    mm_processor_kwargs: Annotated[Any, refused({})] = None
    lora_path: Annotated[Any, refused("")] = None

    def check(self) -> None:
        if len(self.texts) > MAX_TEXTS:
            raise InvalidRequest(
                f"{len(self.texts)} texts, the limit is {MAX_TEXTS}.", param="input"
            )

    @property
    def texts(self) -> list[str | list[int]]:
        """Return each text as a string or as token ids. Raises `InvalidRequest` if they
        are mixed."""
        if isinstance(self.input, str):
            return [self.input]
        kinds = {type(item) for item in self.input}
        if len(kinds) > 1:
            raise InvalidValue(
                "'input' must be a string, a list of strings, token ids, or a list of lists of"
                " token ids.",
                param="input",
            )
        if kinds == {int}:
            return [[item for item in self.input if isinstance(item, int)]]
        return [item for item in self.input if not isinstance(item, int)]


class EmbeddingItem(Struct, frozen=True, kw_only=True):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: Annotated[
        list[float] | str,
        Meta(description="Numbers, or their bytes (float32, little-endian) in base64."),
    ]


class EmbeddingUsage(Struct, frozen=True):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[EmbeddingItem]
    model: str
    usage: EmbeddingUsage


class Embeddings:
    """An ASGI application."""

    def __init__(self, router: Router) -> None:
        self._router = router

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        router, http, state = self._router, Request(scope, receive), scope["state"]
        body, size = await read_body(http, router, EmbeddingRequest)
        caller = Caller(
            tenant=state["tenant"],
            priority=body.priority,
            traceparent=state.get("traceparent", ""),
            limits_left=state["limits_left"],
        )
        async with cancel_on_disconnect(receive):
            texts = await router.work.run_large(caller.tenant.share, lambda: body.texts, size)
            model = await text_model(router, body.model, caller, "embed")
            async with router.admit(caller.tenant, model, caller.limits_left):
                found = await embed_texts(
                    router,
                    model,
                    caller,
                    texts,
                    name_of=lambda number: numbered("input", number, len(texts)),
                    prompt_name=body.prompt_name,
                    dimensions=body.dimensions,
                    truncate=bool(body.truncate),
                    size=size,
                )
                name = body.model or model.names[0]
                answer = await router.work.run(
                    caller.tenant.share,
                    lambda: list(_written(found, name, body.encoding_format)),
                    found.rows.size * 4,
                )
                state["audit"] = audit(model, found)
                # Within the limit of concurrent requests, because it is large.
                await send_json(send, answer, ())


def audit(model: Model, found: EncodedTexts) -> dict[str, object]:
    """Return the log fields of a request."""
    return {
        "model": model.names[0],
        "prompt_tokens": found.num_tokens,
        "texts": len(found.rows),
    }


def _written(found: EncodedTexts, model: str, how: EncodingFormat | None) -> Iterator[bytes]:
    """Yield the answer's JSON in parts: formatting thousands of vectors at once would take several
    times their size."""
    empty = EmbeddingList(
        data=[], model=model, usage=EmbeddingUsage(found.num_tokens, found.num_tokens)
    )
    before, after = msgspec.json.encode(empty).split(b'"data":[]', 1)
    yield before + b'"data":['
    for index, row in enumerate(found.rows):
        item = EmbeddingItem(index=index, embedding=_numbers(row, how))
        yield (b"," if index else b"") + msgspec.json.encode(item)
    yield b"]" + after


def _numbers(row: Rows, how: EncodingFormat | None) -> list[float] | str:
    if how == "base64":
        return base64.b64encode(row.astype("<f4").tobytes()).decode()
    numbers: list[float] = row.tolist()
    return numbers


def operations(router: Router) -> list[Operation]:
    return [
        Operation(
            "/v1/embeddings",
            Embeddings(router),
            "The vectors of texts",
            "OpenAI",
            method="POST",
            body_type=EmbeddingRequest,
            example={"input": ["A text.", "Another."]},
            response_type=EmbeddingList,
            errors=(*BODY_ERRORS, *MODEL_ERRORS, EngineLost, GenerationTimeout),
        )
    ]
