"""Work on the event loop whose size a client chooses."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from router.api import images
from router.errors import ContextLengthExceeded, InvalidRequest
from router.fleet.body_budget import BodyBudget
from router.fleet.engines.engine import Model
from router.fleet.router import Router
from router.fleet.tenants.tenant import Tenant
from router.generation.generation import Generation
from router.generation.sampling import count_entries
from router.images.preparing import ImagePreparer
from router.openai import embeddings
from router.openai.embeddings import EmbeddingRequest
from router.openai.endpoints import Completions
from router.schemas.conversation import ChatMessage
from router.schemas.images import SentImage
from router.schemas.requests import CompletionRequest
from router.tokens.rendering import _Encoder
from tests.conftest import in_loop

MANY = 300_000


def shortest_s(work: Callable[[], object]) -> float:
    """Return the processor time of the fastest of some calls."""
    times = []
    for _ in range(3):
        began = time.thread_time()
        work()
        times.append(time.thread_time() - began)
    return min(times)


def test_prompts_are_counted_without_a_copy() -> None:
    endpoint = Completions(cast(Router, None))
    for prompt, count in (([1] * MANY, 1), ([[1] * MANY], 1), (["a", "b"], 2), ("a", 1)):
        request = CompletionRequest(prompt=cast(Any, prompt))
        assert endpoint.num_prompts(request) == count
        assert shortest_s(partial(endpoint.num_prompts, request)) < 1e-3


def test_an_echo_is_not_copied_for_each_token() -> None:
    generation: Any = object.__new__(Generation)
    generation._request = CompletionRequest(prompt=cast(Any, [1] * MANY), echo=True)
    generation.choices = [SimpleNamespace(echo_is_due=False)]

    def step() -> None:
        with pytest.raises(StopIteration):
            generation.begin_echoes().send(None)

    assert shortest_s(step) < 1e-3
    lengths = [MANY]
    assert count_entries(generation._request, lengths, [1]) == MANY + 1
    assert shortest_s(lambda: count_entries(generation._request, lengths, [1])) < 1e-3


def test_a_prompt_that_is_too_long_is_refused_before_its_tokens_are_copied() -> None:
    class Found:
        ids = property(lambda _: pytest.fail("they were copied"))

        def __len__(self) -> int:
            return MANY

    encoder: Any = object.__new__(_Encoder)
    encoder._fast = SimpleNamespace(encode_batch_fast=lambda *_, **__: [Found()])

    def refuse(num_tokens: int) -> None:
        raise ContextLengthExceeded(f"{num_tokens} tokens")

    with pytest.raises(ContextLengthExceeded, match=str(MANY)):
        encoder.encode(["a"], False, refuse)


@in_loop
async def test_what_takes_long_to_parse_is_read_on_a_thread() -> None:
    on_threads, on_the_loop = list[Any](), list[Any]()
    generation: Any = object.__new__(Generation)

    async def run(work: Any, size: int) -> None:
        on_threads.append(work)

    generation.run = run
    for is_slow in (True, False):
        choice: Any = SimpleNamespace(is_slow=is_slow, behind=False, finish_reason=None)
        choice.advance = partial(on_the_loop.append, choice)
        await generation.advance(choice)
        assert (len(on_threads), len(on_the_loop)) == ((1, 0) if is_slow else (1, 1))


def test_token_ids_to_embed_are_copied_on_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = set()
    texts = EmbeddingRequest.texts.fget  # type: ignore[attr-defined]

    def watched(body: EmbeddingRequest) -> list[Any]:
        threads.add(threading.current_thread())
        found: list[Any] = texts(body)
        return found

    monkeypatch.setattr(EmbeddingRequest, "texts", property(watched))

    async def run_large(key: str, work: Callable[[], Any], size: int) -> Any:
        return await asyncio.to_thread(work)

    async def no_answer(*args: Any, **fields: Any) -> Any:
        raise InvalidRequest("no answer")

    async def no_model(*args: Any) -> None: ...

    monkeypatch.setattr(embeddings, "text_model", no_model)
    monkeypatch.setattr(embeddings, "embed_texts", no_answer)
    work = SimpleNamespace(run_large=run_large)
    bodies = BodyBudget(lambda: 10**6)
    limits: dict[str, Any] = {
        "max_request_bytes": 10**6,
        "takes_images": False,
        "max_request_values": 10**6,
    }
    router = SimpleNamespace(work=work, bodies=bodies, admit=lambda *args: nullcontext(), **limits)
    unread = [b'{"model": "a", "input": [1, 2]}']
    tenant = Tenant(name="a")
    scope = {"type": "http", "headers": [], "state": {"tenant": tenant, "limits_left": {}}}

    async def receive() -> dict[str, Any]:
        if not unread:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": unread.pop(), "more_body": False}

    async def ask() -> None:
        with pytest.raises(InvalidRequest, match="no answer"):
            await embeddings.Embeddings(cast(Router, router))(
                scope, cast(Any, receive), cast(Any, None)
            )

    asyncio.run(ask())
    assert threads and threading.main_thread() not in threads


def test_very_many_images_are_refused_at_little_cost() -> None:
    one = SentImage(type="image", source="", is_url=False, path="a")
    messages = [ChatMessage("user", [one] * 256)] * (MANY // 256)
    checked = []

    class Preparer:
        async def prepare(self, given: list[SentImage], *args: Any) -> Any:
            checked.append(len(given))
            ImagePreparer._check(cast(Any, self), given)

        _settings = SimpleNamespace(max_images=32, max_image_bytes=10**6)
        _metrics = SimpleNamespace(rejected=lambda reason: None)

    router = SimpleNamespace(settings=Preparer._settings, images=Preparer())
    model = cast(Model, SimpleNamespace(image_processor=object()))
    state = cast(Any, SimpleNamespace(tenant=Tenant(), image_memory=object()))

    def ask() -> None:
        preparing = images.with_images(cast(Router, router), messages, model, state, "", 10**6)
        with pytest.raises(InvalidRequest, match="more than 32 images"):
            preparing.send(None)

    assert shortest_s(ask) < 5e-3
    assert set(checked) == {33}
