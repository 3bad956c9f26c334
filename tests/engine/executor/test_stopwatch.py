import time
from typing import Any

import mlx.core as mx
import pytest

from engine.batch import ragged
from engine.batch.graph import GraphBatch
from engine.cache.layout import probe_layout
from engine.executor.batched import BatchedExecutor
from engine.executor.line import DeviceLine
from engine.executor.stopwatch import StepClock, Stopwatch
from engine.plan import Chunk, Decode, Plan, fixed_tables
from shared.wire import SamplingParams
from zoo.build import build

LONG_S = 0.2


class Slow(GraphBatch):
    def logits(self, model: Any, inputs: Any, **options: Any) -> Any:
        time.sleep(LONG_S)
        return super().logits(model, inputs, **options)


@pytest.mark.skipif(mx.default_device() == mx.gpu, reason="there the host does not compute")
def test_building_and_sampling_are_measured_apart_from_computing() -> None:
    ragged.install()
    model = build("llama")
    executor = BatchedExecutor(model, probe_layout(model), 16, Slow)
    slot = 0
    decode = Decode(slot, 4, 5, 0, SamplingParams(temperature=0.7, seed=1))
    for plan in (
        Plan(
            step=1,
            num_pages=1,
            tables=fixed_tables(1, 32, 64),
            chunks=(Chunk(slot, 0, (5, 6, 7, 8)),),
        ),
        Plan(step=2, decodes=(decode,)),
    ):
        result = executor.dispatch(plan).read()
        assert result.elapsed_s >= LONG_S
        assert 0 < result.build_s + result.sample_s <= result.elapsed_s - LONG_S
    assert result.sample_s > 0


def test_handing_work_to_a_device_counts_as_building() -> None:
    for asynchronous in (True, False):
        watch = Stopwatch(asynchronous)
        with watch.computing():
            time.sleep(LONG_S)
        with watch.sampling():
            time.sleep(LONG_S)
        build_s, sample_s = watch.stop()
        assert sample_s >= LONG_S
        assert (build_s >= LONG_S) == asynchronous


def test_time_shared_with_the_step_before_counts_once() -> None:
    clock = StepClock()
    first = second = time.perf_counter()  # with look-ahead both steps start before the first read
    time.sleep(LONG_S)
    assert clock.elapsed_s(first) >= LONG_S
    assert clock.elapsed_s(second) < LONG_S
    assert StepClock().elapsed_s(first) >= LONG_S, "a clock knows only its own executor's steps"


def test_a_device_that_waited_for_the_host_counts_from_where_that_began() -> None:
    """Or a step with drafts, which nothing is built beside, would seem as short as others."""
    line, began = DeviceLine(), time.perf_counter() - 100
    alone = line.send([mx.zeros(1)], since=began)
    line.wait()
    assert alone.elapsed_s is not None and alone.elapsed_s >= 100
    beside = line.send([mx.zeros(1)], since=began)  # it was built while the first was computed
    line.wait()
    assert beside.elapsed_s is not None and beside.elapsed_s < 50
