"""The methods of the service `backend.Backend`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any

import grpc
import httpx
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from services.localai import messages
from services.localai.errors import CallFailed, InvalidCall, of_answer, of_event
from services.localai.loading import LoadRequest, load_request
from services.localai.prediction import ApiRequest, api_request, is_chat, messages_of
from services.localai.replies import ReplyMaker, WholeReply
from services.localai.server import JoinedServer, LoadFailed, ModelServer, OwnServer

logger = logging.getLogger(__name__)

_PART_OF_TIME = 0.95
"""The fraction of the remaining time of a LoadModel call in which a model must load."""
_EVENT = b"data: "
_DONE = b"[DONE]"
_OTHER_MODEL = "model identity mismatch"
"""LocalAI looks for these words."""


class Backend:
    """Serves one model at a time, because LocalAI starts a process for each."""

    def __init__(self, url: str, key: str) -> None:
        """Use the server at ``url``; without it, start a server for each model."""
        self._url, self._key = url, key
        self._loading = asyncio.Lock()
        self._server: ModelServer | None = None
        self._request: LoadRequest | None = None
        self._model = ""
        self._calls = 0
        self._last: ReplyMaker | None = None

    async def close(self) -> None:
        server, self._server, self._request, self._model = self._server, None, None, ""
        if server is not None:
            await server.close()

    async def health(self, call: Any, context: Any) -> Any:
        return messages.Reply(message=b"OK")

    async def load_model(self, call: Any, context: Any) -> Any:
        """Serve a model instead of the previous one. If it is already served, return
        immediately."""
        try:
            request = load_request(call)
        except CallFailed as error:
            return messages.Result(success=False, message=str(error))
        left_s = context.time_remaining()
        async with self._loading:
            if request == self._request and self._server and self._server.trouble is None:
                return messages.Result(success=True, message="the model is already loaded")
            await self.close()
            try:
                patience_s = None if left_s is None else left_s * _PART_OF_TIME
                self._server = await asyncio.wait_for(self._serve(request), patience_s)
            except LoadFailed as error:
                return messages.Result(success=False, message=f"{request.model}: {error}")
            except TimeoutError:
                reason = (
                    f"{request.model} was not ready within the caller's deadline ({left_s:.0f} s)"
                )
                return messages.Result(success=False, message=reason)
            self._request, self._model = request, call.Model
        unknown = f"; unknown options: {', '.join(request.ignored)}" if request.ignored else ""
        return messages.Result(success=True, message=f"{request.model} is ready{unknown}")

    async def _serve(self, request: LoadRequest) -> ModelServer:
        if self._url:
            joined = JoinedServer(self._url, self._key)
            try:
                await joined.find(request.model)
            except LoadFailed:
                await joined.close()
                raise
            return joined
        own = await OwnServer.start(request.model, request.flags)
        try:
            await own.wait_ready()
        except BaseException:  # also if the caller disconnects
            await asyncio.shield(own.close())
            raise
        return own

    async def free(self, call: Any, context: Any) -> Any:
        async with self._loading:
            await self.close()
        return messages.Result(success=True, message="the model was unloaded")

    async def predict_stream(self, call: Any, context: Any) -> AsyncGenerator[Any, None]:
        self._calls += 1
        try:
            server, request = self._prepared(call)
            made = ReplyMaker()
            async with aclosing(_events(server, request)) as events:
                async for event in events:
                    for reply in made.of_event(event):
                        yield reply
            self._last = made
            yield made.last()
        finally:
            self._calls -= 1

    async def predict(self, call: Any, context: Any) -> Any:
        whole, last = WholeReply(), messages.Reply()
        async with aclosing(self.predict_stream(call, context)) as replies:
            async for last in replies:
                whole.add(last)
        return whole.of(last)

    def _prepared(self, call: Any) -> tuple[ModelServer, ApiRequest]:
        server = self._serving(call)
        assert self._request is not None
        limit = self._request.max_bytes
        if limit is not None and call.ByteSize() > limit:
            raise InvalidCall(f"the request has {call.ByteSize()} bytes; the limit is {limit}")
        return server, api_request(call, server.model, self._request.defaults)

    def _serving(self, call: Any) -> ModelServer:
        """Return the server for ``call``. Raises: `CallFailed`."""
        if self._server is None:
            raise CallFailed(grpc.StatusCode.FAILED_PRECONDITION, "no model is loaded")
        if self._server.trouble is not None:
            raise CallFailed(grpc.StatusCode.UNAVAILABLE, self._server.trouble)
        wanted = call.ModelIdentity
        if wanted and wanted != self._model:
            reason = f"{_OTHER_MODEL}: loaded {self._model!r}, requested {wanted!r}"
            raise CallFailed(grpc.StatusCode.NOT_FOUND, reason)
        return self._server

    async def tokenize(self, call: Any, context: Any) -> Any:
        server = self._serving(call)
        body: dict[str, Any] = {"model": server.model}
        body |= {"messages": messages_of(call)} if is_chat(call) else {"prompt": call.Prompt}
        try:
            answer = await server.client.post("/tokenize", content=msgspec.json.encode(body))
        except httpx.HTTPError as error:
            raise CallFailed(
                grpc.StatusCode.UNAVAILABLE, f"the server is lost: {error!r}"
            ) from error
        if answer.status_code != 200:
            raise of_answer(answer.status_code, _message_of(answer.content))
        tokens = answer.json()["tokens"]
        return messages.TokenizationResponse(length=len(tokens), tokens=tokens)

    async def status(self, call: Any, context: Any) -> Any:
        server = self._server
        if server is None:
            state = "BUSY" if self._loading.locked() else "UNINITIALIZED"
            return messages.StatusResponse(state=state)
        if server.trouble is not None:
            return messages.StatusResponse(state="ERROR")
        memory = await _memory(server)
        return messages.StatusResponse(
            state="BUSY" if self._calls else "READY",
            memory=messages.MemoryUsageData(total=sum(memory.values()), breakdown=memory),
        )

    async def metrics(self, call: Any, context: Any) -> Any:
        """Timings of the last answer."""
        last = self._last
        if last is None:
            return messages.MetricsResponse()
        return messages.MetricsResponse(
            tokens_per_second=last.tokens_per_second,
            tokens_generated=last.tokens,
            prompt_tokens_processed=last.prompt_tokens,
        )

    async def embedding(self, call: Any, context: Any) -> Any:
        reason = "this backend generates text and does not support embeddings"
        raise CallFailed(grpc.StatusCode.UNIMPLEMENTED, reason)


async def _events(
    server: ModelServer, request: ApiRequest
) -> AsyncGenerator[Mapping[str, Any], None]:
    """Yield the events of a stream of the API. Raises: `CallFailed`."""
    try:
        async with server.client.stream(
            "POST",
            request.path,
            content=msgspec.json.encode(request.body),
            headers={"Content-Type": "application/json"},
        ) as answer:
            if answer.status_code != 200:
                raise of_answer(answer.status_code, _message_of(await answer.aread()))
            rest = b""
            async for data in answer.aiter_bytes():
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    if line.startswith(_EVENT) and line[len(_EVENT) :] != _DONE:
                        yield _event(line[len(_EVENT) :])
    except httpx.HTTPError as error:
        reason = server.trouble or f"the server's answer is incomplete: {error!r}"
        raise CallFailed(grpc.StatusCode.UNAVAILABLE, reason) from None


def _event(data: bytes) -> Mapping[str, Any]:
    event: Mapping[str, Any] = msgspec.json.decode(data)
    if error := event.get("error"):
        raise of_event(error)
    return event


def _message_of(content: bytes) -> str:
    try:
        return str(msgspec.json.decode(content)["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return content.decode(errors="replace")[:500]


async def _memory(server: ModelServer) -> dict[str, int]:
    """Return the bytes that MLX uses, by engine."""
    try:
        text = (await server.client.get("/metrics", timeout=5)).raise_for_status().text
    except httpx.HTTPError:
        return {}
    return {
        sample.labels["engine"]: int(sample.value)
        for family in text_string_to_metric_families(text)
        if family.name == "mlx_lm_server_active_memory_bytes"
        for sample in family.samples
    }


Method = Callable[[Any, Any], Awaitable[Any]]


def service(backend: Backend) -> Any:
    """Return the handlers of ``backend``. gRPC answers UNIMPLEMENTED for other methods."""
    unary: dict[str, tuple[Method, Any, Any]] = {
        "Health": (backend.health, messages.HealthMessage, messages.Reply),
        "LoadModel": (backend.load_model, messages.ModelOptions, messages.Result),
        "Free": (backend.free, messages.HealthMessage, messages.Result),
        "Predict": (backend.predict, messages.PredictOptions, messages.Reply),
        "TokenizeString": (
            *(backend.tokenize, messages.PredictOptions, messages.TokenizationResponse),
        ),
        "Status": (backend.status, messages.HealthMessage, messages.StatusResponse),
        "GetMetrics": (backend.metrics, messages.MetricsRequest, messages.MetricsResponse),
        "Embedding": (backend.embedding, messages.PredictOptions, messages.EmbeddingResult),
    }
    handlers = {
        name: grpc.unary_unary_rpc_method_handler(
            _answering(method), request.FromString, reply.SerializeToString
        )
        for name, (method, request, reply) in unary.items()
    }
    handlers["PredictStream"] = grpc.unary_stream_rpc_method_handler(
        _streaming(backend.predict_stream),
        messages.PredictOptions.FromString,
        messages.Reply.SerializeToString,
    )
    return grpc.method_handlers_generic_handler(messages.SERVICE, handlers)


def _answering(method: Method) -> Method:
    async def answer(call: Any, context: Any) -> Any:
        try:
            return await method(call, context)
        except CallFailed as error:
            await context.abort(error.code, str(error))

    return answer


def _streaming(method: Callable[[Any, Any], AsyncGenerator[Any, None]]) -> Any:
    async def stream(call: Any, context: Any) -> AsyncGenerator[Any, None]:
        try:
            async with aclosing(method(call, context)) as replies:
                async for reply in replies:
                    yield reply
        except CallFailed as error:
            await context.abort(error.code, str(error))

    return stream
