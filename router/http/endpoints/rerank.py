"""`/v1/rerank` in the format of Jina and Cohere, and `/v1/score` in vLLM's."""

from __future__ import annotations

import time
import uuid
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from router.api.body import json_response, read_body
from router.api.endpoints import cancel_on_disconnect
from router.api.operations import Operation
from router.encoding.embedding import MAX_TEXTS, embed_texts, numbered, text_model
from router.encoding.encoding import Caller, EncodedTexts
from router.encoding.ranking import score_pairs
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
from router.fleet.tasks import models_for
from router.openai.embeddings import audit
from router.schemas.body import Count, RequestBody, other_name, refused

_Texts = str | Annotated[list[str], Meta(min_length=1, max_length=MAX_TEXTS)]


class Document(Struct, frozen=True):
    text: str


class RerankRequest(RequestBody, frozen=True, kw_only=True):
    model: Annotated[str, Meta(max_length=512)] | None = None
    query: str
    documents: Annotated[list[str | Document], Meta(min_length=1, max_length=MAX_TEXTS)]
    top_n: Annotated[
        Count | None, Meta(description="Number of best documents to return (default: all).")
    ] = None
    return_documents: bool | None = None
    instruction: Annotated[
        str | None,
        Meta(description="Task instruction, for models that support it, such as Qwen3-Reranker."),
    ] = None
    max_tokens_per_doc: Annotated[
        Count | None,
        Meta(description="Max tokens of query and document together, at most the model's limit."),
    ] = None
    truncate: Annotated[
        bool | None,
        Meta(description="Truncate documents that are too long (default: true)."),
    ] = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None

    # Of Cohere's first version.
    rank_fields: Annotated[Any, refused([])] = None
    max_chunks_per_doc: Annotated[Any, refused(advice="Use 'max_tokens_per_doc'.")] = None
    # Of Voyage, Jina, text-embeddings-inference, vLLM and SGLang.
    top_k: Annotated[Count | None, other_name("top_n")] = None
    truncation: Annotated[bool | None, other_name("truncate")] = None
    raw_scores: Annotated[Any, refused(False)] = None
    use_activation: Annotated[Any, refused(True)] = None
    max_tokens_per_query: Annotated[Any, refused(0)] = None
    instruct: Annotated[str | None, other_name("instruction", "")] = None
    truncate_prompt_tokens: Annotated[
        Any, refused(advice="Use 'truncate' and 'max_tokens_per_doc'.")
    ] = None
    chat_template_kwargs: Annotated[Any, refused({})] = None
    mm_processor_kwargs: Annotated[Any, refused({})] = None

    @property
    def texts(self) -> list[str]:
        return [each if isinstance(each, str) else each.text for each in self.documents]


class RerankUsage(Struct, frozen=True):
    prompt_tokens: int
    total_tokens: int


class RankedDocument(Struct, frozen=True, kw_only=True, omit_defaults=True):
    index: int
    relevance_score: Annotated[float, Meta(description="From 0 to 1.")]
    document: Document | None = None


class ApiVersion(Struct, frozen=True):
    version: str = "2"


class BilledUnits(Struct, frozen=True):
    search_units: int = 1


class RerankMeta(Struct, frozen=True):
    """Additional data that Cohere's clients read."""

    api_version: ApiVersion = ApiVersion()
    billed_units: BilledUnits = BilledUnits()


class RerankResponse(Struct, frozen=True, kw_only=True):
    id: str
    model: str
    results: Annotated[list[RankedDocument], Meta(description="Best first.")]
    usage: RerankUsage
    meta: RerankMeta = RerankMeta()


class ScoreRequest(RequestBody, frozen=True, kw_only=True):
    """One text and several others, or the same number of both."""

    model: Annotated[str, Meta(max_length=512)] | None = None
    text_1: Annotated[_Texts | None, Meta(description="Required, under either name.")] = None
    text_2: Annotated[_Texts | None, Meta(description="Required, under either name.")] = None
    queries: Annotated[_Texts | None, Meta(description="Another name of text_1.")] = None
    documents: Annotated[_Texts | None, Meta(description="Another name of text_2.")] = None
    truncate: Annotated[
        bool | None, Meta(description="Truncate texts that are too long instead of rejecting them.")
    ] = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None

    # Of vLLM.
    use_activation: Annotated[Any, refused(True)] = None
    instruction: Annotated[Any, refused("", advice="Use '/v1/rerank'.")] = None
    truncate_prompt_tokens: Annotated[Any, refused(advice="Use 'truncate'.")] = None
    max_tokens_per_query: Annotated[Any, refused(0)] = None
    max_tokens_per_doc: Annotated[Any, refused(0, advice="Use '/v1/rerank'.")] = None
    chat_template_kwargs: Annotated[Any, refused({})] = None
    mm_processor_kwargs: Annotated[Any, refused({})] = None

    def check(self) -> None:
        _ = self.pairs

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Raises `InvalidRequest` if texts are missing, or their numbers do not match."""
        (first_name, firsts), (second_name, seconds) = self._firsts, self._seconds
        if len(firsts) == 1:
            firsts = firsts * len(seconds)
        if len(firsts) != len(seconds):
            raise InvalidValue(
                f"'{first_name}' has {len(firsts)} texts and '{second_name}' {len(seconds)}: "
                f"'{first_name}' must have one, or the same number.",
                param=second_name,
            )
        return list(zip(firsts, seconds, strict=True))

    @property
    def names(self) -> tuple[str, str]:
        """The names under which the texts were sent."""
        return self._firsts[0], self._seconds[0]

    def name_of(self, number: int) -> str:
        """Return the name of a text, for errors; ``number`` counts the texts of `pairs`."""
        name, texts = self._seconds if number % 2 else self._firsts
        return numbered(name, number // 2, len(texts))

    @property
    def _firsts(self) -> tuple[str, list[str]]:
        return self._texts("text_1", "queries")

    @property
    def _seconds(self) -> tuple[str, list[str]]:
        return self._texts("text_2", "documents")

    def _texts(self, name: str, other_name: str) -> tuple[str, list[str]]:
        """Return the name that was used, and the texts."""
        given = {each: getattr(self, each) for each in (name, other_name)}
        found = {each: texts for each, texts in given.items() if texts is not None}
        if len(found) != 1:
            reason = "is required" if not found else f"and '{other_name}' are the same field"
            raise InvalidValue(f"'{name}' {reason}.", param=name)
        ((used, texts),) = found.items()
        return used, [texts] if isinstance(texts, str) else texts


class Score(Struct, frozen=True, kw_only=True):
    index: int
    object: Literal["score"] = "score"
    score: Annotated[
        float,
        Meta(description="From 0 to 1; for an embedding model, the cosine similarity."),
    ]


class ScoreResponse(Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Score]
    usage: RerankUsage


async def rerank(http: Request) -> Response:
    router: Router = http.app.state.router
    body, size = await read_body(http, router, RerankRequest)
    caller = _caller(http, body.priority)
    async with cancel_on_disconnect(http.receive):
        model = await text_model(router, body.model, caller, "rerank")
        async with router.admit(caller.tenant, model, caller.limits_left):
            texts = body.texts
            found = await score_pairs(
                router,
                model,
                caller,
                [(body.query, text) for text in texts],
                fields=("query", "documents"),
                instruction=body.instruction,
                max_tokens=body.max_tokens_per_doc,
                truncate=body.truncate is not False,
                size=size + (len(body.query) + len(body.instruction or "")) * len(texts),
            )
    http.state.audit = audit(model, found)
    scores = found.rows[:, 0]
    best = np.argsort(-scores, kind="stable")[: body.top_n].tolist()
    results = [
        RankedDocument(
            index=index,
            relevance_score=float(scores[index]),
            document=Document(texts[index]) if body.return_documents else None,
        )
        for index in best
    ]
    answer = RerankResponse(
        id=f"rerank-{uuid.uuid4().hex}",
        model=body.model or model.names[0],
        results=results,
        usage=RerankUsage(found.num_tokens, found.num_tokens),
    )
    # Including the documents, it is as large as the body.
    return await router.work.run_large(caller.tenant.share, lambda: json_response(answer), size)


async def score(http: Request) -> Response:
    router: Router = http.app.state.router
    body, size = await read_body(http, router, ScoreRequest)
    caller = _caller(http, body.priority)
    async with cancel_on_disconnect(http.receive):
        model = await _scoring_model(router, body.model, caller)
        async with router.admit(caller.tenant, model, caller.limits_left):
            if model.hello.task == "embed":
                scores, tokens = await _cosines(router, model, caller, body, size)
            else:
                found = await score_pairs(
                    router,
                    model,
                    caller,
                    body.pairs,
                    fields=body.names,
                    truncate=bool(body.truncate),
                    size=size + sum(len(first) for first, _ in body.pairs),
                )
                scores, tokens = found.rows[:, 0].tolist(), found.num_tokens
    return json_response(
        ScoreResponse(
            id=f"score-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=body.model or model.names[0],
            data=[Score(index=i, score=value) for i, value in enumerate(scores)],
            usage=RerankUsage(tokens, tokens),
        )
    )


async def _scoring_model(router: Router, name: str | None, caller: Caller) -> Model:
    """Return a reranking model, or an embedding model if it is named or there is no other."""
    if name is None and not models_for("rerank", router, caller.tenant):
        return await text_model(router, name, caller, "embed")
    if name is not None:
        model = await router.loaded_model(name, caller.tenant)
        if model.hello.task == "embed":
            return model
    return await text_model(router, name, caller, "rerank")


async def _cosines(
    router: Router, model: Model, caller: Caller, body: ScoreRequest, size: int
) -> tuple[list[float], int]:
    pairs = body.pairs
    texts: list[str | list[int]] = [text for pair in pairs for text in pair]
    if len(texts) > 2 * MAX_TEXTS:
        raise InvalidRequest(f"{len(pairs)} pairs, the limit is {MAX_TEXTS}.", param=body.names[1])
    found: EncodedTexts = await embed_texts(
        router,
        model,
        caller,
        texts,
        name_of=body.name_of,
        truncate=bool(body.truncate),
        size=2 * size,
    )
    rows = found.rows
    cosines = await router.work.run_large(
        caller.tenant.share, lambda: _cosines_of(rows), rows.size * 4
    )
    return cosines, found.num_tokens


def _cosines_of(rows: Rows) -> list[float]:
    """Return the cosine of each two rows, (2 * pairs, dimensions)."""
    firsts, seconds = rows[0::2], rows[1::2]
    lengths = np.linalg.norm(firsts, axis=1) * np.linalg.norm(seconds, axis=1)
    products = (firsts * seconds).sum(1)
    cosines: list[float] = (products / np.where(lengths > 0, lengths, 1)).tolist()
    return cosines


def _caller(http: Request, priority: int | None) -> Caller:
    return Caller(
        tenant=http.state.tenant,
        priority=priority,
        traceparent=http.scope["state"].get("traceparent", ""),
        limits_left=http.state.limits_left,
    )


_operation = partial(
    Operation,
    method="POST",
    tag="Rankings",
    errors=(*BODY_ERRORS, *MODEL_ERRORS, EngineLost, GenerationTimeout),
)
_RERANK = {"query": "What is it?", "documents": ["It is this.", "It was that."]}
_SCORE = {"text_1": "What is it?", "text_2": ["It is this.", "It was that."]}
OPERATIONS = (
    *(
        _operation(
            path=path,
            endpoint=rerank,
            summary="Rank documents by how well they answer a query",
            body_type=RerankRequest,
            example=_RERANK,
            response_type=RerankResponse,
        )
        for path in ("/v1/rerank", "/v2/rerank", "/rerank")
    ),
    *(
        _operation(
            path=path,
            endpoint=score,
            summary="Score how well texts match",
            body_type=ScoreRequest,
            example=_SCORE,
            response_type=ScoreResponse,
        )
        for path in ("/v1/score", "/score")
    ),
)
