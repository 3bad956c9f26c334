"""Random events in any order: the dispatcher keeps its books, and every sequence ends."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from router.encoding.encoding import PIECE_TOKENS, Caller, _rows_of
from router.fleet.engines.engine import Engine, ModelReplicas
from router.fleet.metrics.prometheus import Metrics
from router.fleet.queue.dispatch import Dispatcher
from router.fleet.sequences.remote_request import RemoteRequest, RemoteRequestState
from router.fleet.sequences.remote_sequence import RemoteSequence
from router.fleet.tenants.tenant import Tenant
from shared.settings import Settings
from shared.wire import (
    Accepted,
    AdapterDecision,
    AdapterRef,
    Delta,
    LiveRequest,
    Refused,
    TextTask,
    Usage,
    Vision,
)
from tests.conftest import in_loop
from tests.router.scripted_engine import make_hello, make_submit

ROWS = 3
ADAPTER = AdapterRef(name="a", path="/a", digest="d", rank=4)
ADAPTED = Engine(b"e", make_hello("e", max_adapters=1), "e", 5.0)
STATE = RemoteRequestState
_USAGE = Usage(prompt_tokens=1, completion_tokens=1)


class Fleet:
    """A dispatcher with two engines, one of which takes adapters, and one whose stop string was
    found in some sequences."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        settings = Settings()
        self.model = ModelReplicas(make_hello("e"), settings)
        self.model.renderer = SimpleNamespace()  # type: ignore[assignment]
        for name, max_adapters in (("e0", 1), ("e1", 0)):
            hello = make_hello(name, max_sequences=ROWS, max_adapters=max_adapters)
            engine = Engine(name.encode(), hello, name, 5.0)
            engine.phase = "ready"
            self.model.engines.append(engine)
        self.takes = True
        self.dispatcher = Dispatcher(
            settings, lambda *_: self.takes, Metrics("test"), lambda tenant, count: None
        )
        self.sequences: list[RemoteSequence] = []
        self.stopped: dict[RemoteSequence, int] = {}
        """The tokens that each had when it was stopped."""

    def act(self) -> None:
        actions = "submit submit submit accept refuse tokens tokens tokens stop release heartbeat"
        actions += " lose silence tick"
        getattr(self, f"_{self.random.choice(actions.split())}")()
        self.check()

    def _submit(self) -> None:
        tenant = Tenant(
            name=self.random.choice("ab"), alone=False, background=self.random.random() < 0.4
        )
        submit = make_submit(
            f"r{len(self.sequences)}",
            priority=tenant.priority(0),
            adapter=ADAPTER if self.random.random() < 0.3 else None,
        )
        self.sequences.append(RemoteSequence(submit, tenant, lambda: None))
        self.dispatcher.admit(self.model, self.sequences[-1:])

    def _placed(self) -> RemoteRequest | None:
        found = [one for one in self.dispatcher.in_flight if one.engine is not None]
        return self.random.choice(found) if found else None

    def _named(self, request: RemoteRequest) -> dict[str, Any]:
        """Return the id, and the attempt, now and then that before."""
        attempt = request.attempt - (self.random.random() < 0.1)
        return {"request_id": request.request_id, "attempt": attempt}

    def _accept(self) -> None:
        if (request := self._placed()) is not None and request.engine is not None:
            self.dispatcher.on_accepted(request.engine, Accepted(**self._named(request)))

    def _refuse(self) -> None:
        if (request := self._placed()) is not None and request.engine is not None:
            reason: Any = self.random.choice(["full", "draining", "invalid"])
            refused = Refused(**self._named(request), reason=reason, message="no")
            self.dispatcher.on_refused(request.engine, refused)

    def _tokens(self, *, finish: str | None = None) -> None:
        if (request := self._placed()) is not None and request.engine is not None:
            finish = finish or self.random.choice([None] * 6 + ["length", "stop", "abort", "error"])
            index = request.num_output_tokens + (self.random.random() < 0.05)
            ids, usage = [] if finish in ("abort", "error") else [5], _USAGE if finish else None
            told: dict[str, Any] = {"index": index, "finish": finish, "usage": usage}
            delta = Delta(**self._named(request), token_ids=ids, **told)
            self.dispatcher.on_tokens(request.engine, [delta])

    def _stop(self) -> None:
        able = [one for one in self.sequences if one.has_output and not one.done]
        able = [one for one in able if one not in self.stopped]
        if able:
            sequence = self.random.choice(able)
            self.stopped[sequence] = sequence.num_output_tokens
            self.dispatcher.stop(sequence)

    def _release(self) -> None:
        if self.sequences:
            self.dispatcher.release(self.random.choice(self.sequences))

    def _heartbeat(self) -> None:
        engine = self.random.choice(self.model.engines)
        live = [
            LiveRequest(request_id=one, attempt=self.random.randrange(2), generated=0)
            for one in [*engine.request_ids, "unknown"]
            if self.random.random() < 0.7
        ]
        self.dispatcher.reconcile(engine, live)
        engine.backoff_until = 0.0
        self.dispatcher.place(self.model)

    def _lose(self) -> None:
        engine = self.random.choice(self.model.engines)
        engine.lost_reason = "killed"
        self.dispatcher.on_engine_lost(engine, "killed", planned=self.random.random() < 0.5)
        self.check()
        engine.lost_reason = None
        self.dispatcher.place(self.model)

    def _silence(self) -> None:
        """Let time pass, or let the engines' sockets take nothing."""
        self.takes = not self.takes
        for engine in self.model.engines:
            engine.backoff_until = 0.0
        for sequence in self.sequences:
            sequence.placed_at -= 3.0

    def _tick(self) -> None:
        self.dispatcher.tick()

    def check(self) -> None:
        entries = list(self.dispatcher.in_flight)
        assert entries == [one for one in self.sequences if not one.done]
        placed = [one for one in entries if one.engine is not None]
        for one in entries:
            waits = one.state is STATE.WAITING
            assert waits == (one.engine is None), one.state
            assert not one.names_adapter or one.engine in (None, self.model.engines[0])
        for engine in self.model.engines:
            own = {one.request_id for one in placed if one.engine is engine}
            assert own == set(engine.request_ids) and len(own) <= ROWS
        queue = self.dispatcher.queue_of(self.model)
        assert len(queue) == len(entries) - len(placed)
        for background, counted in ((False, queue._running), (True, queue._running_background)):
            keys = (one.key for one in placed if one.tenant.background == background)
            assert counted == Counter(keys)
        if all(one.tenant.background for one in entries):  # idle times are not slow ones
            assert self.dispatcher.departure_rate.estimate_s(0) is None
        for sequence, tokens in self.stopped.items():
            assert sequence.state in (STATE.STOPPING, STATE.DONE), "its text is complete"
            assert sequence.num_output_tokens == tokens


@pytest.mark.parametrize("seed", range(30))
def test_any_order_of_events_keeps_the_books_and_ends(seed: int) -> None:
    fleet = Fleet(seed)
    for _ in range(150):
        fleet.act()
    fleet.takes = True
    deadline = time.monotonic() + 10
    while fleet.dispatcher.num_in_flight:
        assert time.monotonic() < deadline, list(fleet.dispatcher.in_flight)
        for engine in fleet.model.engines:
            engine.backoff_until = 0.0
        fleet.dispatcher.place(fleet.model)
        fleet._tokens(finish="length")
        fleet.check()


def version(**fields: Any) -> ModelReplicas:
    return ModelReplicas(make_hello("e", **fields), Settings())


def versions(before: dict[str, Any], after: dict[str, Any]) -> tuple[ModelReplicas, ModelReplicas]:
    first, second = version(**before), version(**after)
    first.successor = second
    return first, second


def test_images_are_not_given_to_a_version_that_takes_others() -> None:
    vision = Vision(model_type="llava", placeholder="<image>", placeholder_id=5, image_token_id=5)
    before, after = versions({"vision": vision}, {})
    assert before.version_for(has_output=False) is after
    assert before.version_for(has_output=False, has_images=True) is before


def test_adapters_are_not_given_to_a_version_that_takes_none() -> None:
    before, after = versions({}, {})
    assert before.version_for(has_output=False) is after
    assert before.version_for(has_output=False, adapter=ADAPTER) is before
    after.engines.append(ADAPTED)
    assert before.version_for(has_output=False, adapter=ADAPTER) is after


def test_adapters_are_not_given_to_other_weights_unless_they_are_named_there_too() -> None:
    before, after = versions({}, {"fingerprint": "other weights"})
    after.engines.append(ADAPTED)
    assert before.version_for(has_output=False) is after
    assert before.version_for(has_output=False, adapter=ADAPTER) is before
    after.apply([AdapterDecision(name="a", adapter=ADAPTER, version=1)])
    assert before.version_for(has_output=False, adapter=ADAPTER) is after


def test_texts_are_not_given_to_a_version_with_other_vectors() -> None:
    """Their tokens contain its prompt, and their rows have its width."""
    before, after = versions(*({"text_task": TextTask(dimensions=size)} for size in (64, 32)))
    assert before.version_for(has_output=False) is before
    after.hello = before.hello
    assert before.version_for(has_output=False) is after


@in_loop
async def test_all_texts_of_a_request_are_of_the_same_weights() -> None:
    before, after = versions({"fingerprint": "a"}, {"fingerprint": "b"})
    admitted: list[ModelReplicas] = []
    dispatcher = SimpleNamespace(
        admit=lambda model, pieces: admitted.append(model), release=lambda piece: None
    )
    model: Any = SimpleNamespace(replicas=before, hello=before.hello)
    caller = Caller(tenant=Tenant(), limits_left={})
    texts = [(tuple([number] * PIECE_TOKENS), 0) for number in range(3)]
    rows = _rows_of(SimpleNamespace(dispatcher=dispatcher), model, caller, 0, texts)  # type: ignore[arg-type]
    with suppress(TimeoutError):
        async with asyncio.timeout(0.05):
            await anext(rows)
    assert admitted == [after] * 3


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_prefix_that_a_request_computed_itself_does_not_count_as_cached(is_stopped: bool) -> None:
    sequence = RemoteSequence(make_submit("r"), Tenant(name="a"), lambda: None)

    def usage(ram: int, ssd: int) -> Usage:
        count = len(sequence.output_token_ids) + 1
        cached = {"cached_ram_tokens": ram, "cached_ssd_tokens": ssd}
        return Usage(prompt_tokens=64, completion_tokens=count, **cached)

    def receive(usage: Usage) -> None:
        index, attempt = len(sequence.output_token_ids), sequence.attempt
        delta = Delta(request_id="r", attempt=attempt, index=index, token_ids=[5], usage=usage)
        sequence.apply(delta, 0.0)

    receive(usage(16, 0))
    sequence.requeue()  # its engine was lost, or a line of a batch gave its place back
    if is_stopped:
        sequence.stop()
        sequence.end(usage(32, 16))
    else:
        receive(usage(32, 16))
    found = sequence.usage
    assert found is not None and found.completion_tokens == 2
    assert (found.cached_ram_tokens, found.cached_ssd_tokens) == (16, 0)
