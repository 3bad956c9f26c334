"""The loop of an engine that embeds, without processes around it."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from typing import Any, cast

import numpy as np
import pytest

from engine.embedding.core import EmbeddingCore, Rows
from engine.io.inbox import Inbox, NewRouter, PicturedSubmit
from engine.io.status import EngineStatus
from engine.io.thread import IOThread
from engine.model.encoder import Text
from shared import wire
from tests.engine.conftest import Wrap
from tests.shared.submits import submit

LAYERS = 4


class Model:
    """A row has the first token of its text; a text that begins with 13 fails."""

    def __init__(self) -> None:
        self.passes: list[list[int]] = []
        self.layer_s = 0.0

    def compute(self, texts: Sequence[Text]) -> Generator[None, None, Rows]:
        self.passes.append([text.token_ids[0] for text in texts])
        for _ in range(LAYERS):
            time.sleep(self.layer_s)
            yield
        if 13 in self.passes[-1]:
            raise ValueError("thirteen")
        return np.array([[text.token_ids[0]] for text in texts], np.float32)

    def check(self, text: Text) -> str | None:
        return "too long" if len(text) > 10 else None


class Engine:
    def __init__(self, max_jobs: int = 8) -> None:
        self.model, self.inbox, self.status = Model(), Inbox(), EngineStatus()
        self.sent: list[Any] = []
        self.core = EmbeddingCore(
            model=self.model,
            inbox=self.inbox,
            io_thread=cast(IOThread, self),
            status=self.status,
            max_jobs=max_jobs,
        )

    @property
    def answered(self) -> list[str]:
        return [each.request_id for each in self.sent]

    def send(self, messages: Sequence[wire.Message]) -> None:
        self.sent += messages

    def run(self, *messages: Any, steps: int = 50) -> list[Any]:
        for message in messages:
            self.inbox.put(message)
        for _ in range(steps):
            self.core.run_once()
        return self.sent


def encode(name: str, *texts: list[int], attempt: int = 0, **fields: Any) -> wire.Encode:
    return wire.Encode(
        request_id=name, attempt=attempt, token_ids=list(texts), group=name, **fields
    )


def numbers(message: wire.Encoded) -> list[float]:
    found: list[float] = np.frombuffer(message.rows, "<f4").tolist()
    return found


def test_rows_are_sent_once_all_are_there() -> None:
    (encoded,) = Engine().run(encode("a", [5], [7], [5]))
    assert (encoded.request_id, numbers(encoded), encoded.error) == ("a", [5, 7, 5], None)


def test_a_text_that_fails_fails_alone() -> None:
    engine = Engine()
    sent = {each.request_id: each for each in engine.run(encode("a", [5], [13]), encode("b", [6]))}
    assert "thirteen" in sent["a"].error
    assert numbers(sent["b"]) == [6]
    assert engine.status.live == []


def test_an_engine_whose_device_accepts_no_more_work_ends() -> None:
    engine = Engine()

    def compute(texts: Sequence[Text]) -> Generator[None, None, Rows]:
        yield
        raise RuntimeError("[METAL] Command buffer execution failed: Ignored (for causing errors)")

    engine.model.compute = compute  # type: ignore[method-assign]
    (failed,) = engine.run(encode("a", [5]))
    assert "Ignored" in failed.error
    with pytest.raises(RuntimeError, match="no more work"):
        engine.run(encode("b", [6]))


@pytest.mark.parametrize(
    ("texts", "later", "order", "passes"),
    [
        ([[1] * 10, [2] * 10], {"b": [3]}, "ba", [[1, 2], [3]]),
        ([[1] * 10], {"b": [3] * 10, "c": [4] * 10}, "abc", [[1], [3, 4]]),
        ([[1] * 10], {"b": [3] * 2}, "ba", [[1], [3]]),
    ],
    ids=["others with fewer texts go between layers", "alike go in order", "a short one overtakes"],
)
def test_texts_that_come_during_a_pass(
    texts: list[list[int]], later: dict[str, list[int]], order: str, passes: list[list[int]]
) -> None:
    engine = Engine()
    engine.run(encode("a", *texts), steps=2)
    engine.run(*(encode(name, text) for name, text in later.items()))
    assert engine.answered == list(order) and engine.model.passes == passes


def test_texts_that_wait_are_looked_through_between_layers_only_after_others_came(
    wrap: Wrap,
) -> None:
    engine = Engine()
    engine.run(encode("a", [1] * 10), steps=2)
    calls = []

    @wrap(engine.core._queue, "take")
    def counted(take: Any, *args: Any, **how: Any) -> dict[Text, str]:
        calls.append(args)
        return take(*args, **how)

    engine.run(encode("b", [3] * 10), steps=2)
    assert len(calls) == 1
    engine.run(encode("c", [4] * 2), steps=1)
    assert engine.model.passes == [[1], [4]]
    engine.run()
    assert engine.answered == ["c", "a", "b"]


def test_others_who_come_all_the_time_do_not_keep_a_pass_from_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("engine.scheduler.timing.time_share.MAX_LEAD_S", 0.02)
    engine = Engine()
    engine.model.layer_s = 0.002
    engine.run(encode("a", *([n] * 10 for n in range(20))), steps=2)
    for number in range(60):
        engine.run(encode(f"b{number}", [30 + number]), steps=LAYERS)
    assert engine.answered[0] == "b0" and "a" in engine.answered, "it gets half of the time"


def test_what_cannot_be_computed_is_refused() -> None:
    engine = Engine(max_jobs=1)
    refused = engine.run(
        encode("none"),
        encode("empty", []),
        encode("long", [1] * 11),
        encode("uneven", [1], second_starts=[0, 0]),
        encode("outside", [1], second_starts=[2]),
        encode("fits", [1]),
        encode("full", [1]),
        steps=1,
    )
    reasons = {each.request_id: each.reason for each in refused}
    assert reasons.pop("full") == "full"
    assert set(reasons.values()) == {"invalid"}
    assert reasons.keys() == {"none", "empty", "long", "uneven", "outside"}


def test_a_model_that_embeds_generates_nothing() -> None:
    for message in (submit(), PicturedSubmit(submit(), (b"1",))):
        (refused,) = Engine().run(message)
        assert refused.reason == "unsupported"


def test_jobs_that_nobody_waits_for_are_dropped() -> None:
    engine = Engine()
    gone = NewRouter(frozenset({("b", 0)}))
    abort = wire.Abort(request_id="a")
    assert engine.run(encode("a", [1]), encode("b", [2]), abort, gone) == []
    assert engine.model.passes == []
    assert engine.status.live == []


def test_a_pass_that_nobody_waits_for_any_more_ends() -> None:
    engine = Engine()
    engine.run(encode("a", [1]), steps=2)
    engine.run(wire.Abort(request_id="a"), encode("b", [2]), steps=1 + LAYERS)
    assert engine.answered == ["b"]
    engine.run(encode("c", [1]))
    assert engine.answered == ["b", "c"] and engine.model.passes == [[1], [2], [1]]


def test_a_job_is_told_before_its_first_layer(wrap: Wrap) -> None:
    engine, told = Engine(), []

    @wrap(engine.model, "compute")
    def watched(compute: Any, texts: Sequence[Text]) -> Generator[None, None, Rows]:
        told.append(list(engine.status.live))
        return compute(texts)

    engine.run(encode("a", [1]))
    assert len(told) == 1 and told[0]


def test_a_drained_engine_finishes_what_it_has() -> None:
    engine = Engine()
    for message in (encode("a", [1]), wire.Drain(), encode("b", [2])):
        engine.inbox.put(message)
    engine.core.run()
    sent = {type(each).__name__: each.request_id for each in engine.sent}
    assert sent == {"Refused": "b", "Encoded": "a"}


def test_live_jobs_and_figures_are_told() -> None:
    engine = Engine()
    engine.run(encode("a", [1, 2], [3]), steps=2)
    assert [one.request_id for one in engine.status.live] == ["a"]
    assert engine.status.stats.running == 2
    progress = engine.status.progress
    engine.run()
    assert engine.status.progress > progress
    stats = engine.status.stats
    assert (stats.texts_total, stats.steps_total, stats.prefill_tokens_total) == (2, 1, 3)
