"""What is not a number in a slot does not reach the next sequence there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from engine.backend.gpu_path import forced_gpu_path
from tests.engine.whole import Whole
from tests.engine.whole import random_tokens as prompt
from tests.oracle import oracle


@pytest.fixture
def whole(request: pytest.FixtureRequest, llama: Path) -> Iterator[Whole]:
    with forced_gpu_path() if request.param else nullcontext():
        yield Whole(llama, num_blocks=1024)


def spoil(whole: Whole, name: str) -> None:
    """Make the KV of a running sequence NaN, as a model does that leaves the range of fp16."""
    slot = whole.scheduler.sequences.live[name].held_slot
    slab = whole.executor._slabs[slot.slab_id]  # type: ignore[attr-defined]
    mx.synchronize()
    for number, array in enumerate(slab.arrays):
        values = np.array(array)
        values[slot.row] = np.nan
        slab.arrays[number] = mx.array(values)


@pytest.mark.parametrize(
    ("whole", "aborted"),
    [(False, True), (True, False)],
    ids=["as on a CPU, aborted", "as on a GPU, at its end"],
    indirect=["whole"],
)
def test_a_slot_with_nan_is_cleared_before_the_next_sequence(
    whole: Whole, llama: Path, aborted: bool
) -> None:
    """The next one is short, and attends under a mask beside a long one."""
    # Chunks of a fixed length put both prompts in one pass, so that both streams begin in one step.
    # By predicted times the second prompt could wait until the first stream has ended.
    whole.renew(whole.executor.spec.look_ahead, prefill_chunk_tokens=512, streams_share=0.05)
    whole.submit("spoiled", prompt(1, 90), 200 if aborted else 30)
    whole.submit("long", prompt(2, 80), 100)
    whole.turn_until(lambda: whole.texts["spoiled"])
    assert whole.texts["long"]
    spoiled = whole.scheduler.sequences.live["spoiled"]
    slot = spoiled.held_slot
    spoil(whole, "spoiled")
    if aborted:
        whole.turn()
        whole.scheduler.abort("spoiled")
    whole.turn_until(lambda: spoiled.slot is None)
    whole.submit("next", prompt(3, 9), 20)
    whole.turn()
    assert whole.scheduler.sequences.live["next"].slot == slot
    whole.run()
    known = oracle(llama)
    for name, tokens in (("long", prompt(2, 80)), ("next", prompt(3, 9))):
        text = whole.texts[name]
        known.check_same(tokens, text, known.greedy(tokens, len(text)))
