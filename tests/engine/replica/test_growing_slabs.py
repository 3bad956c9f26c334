"""Scheduler and executor as on a GPU, forced on the CPU: shared slabs that grow, look-ahead."""

from collections import deque
from collections.abc import Callable
from pathlib import Path

import mlx_lm
import pytest

from engine.batch import ragged
from engine.batch.gpu import GPUBatch
from engine.cache.layout import probe_layout
from engine.cache.quantization import Precision
from engine.executor.base import PendingStep
from engine.executor.batched import BatchedExecutor
from engine.scheduler import Scheduler, SchedulerConfig
from tests.shared.submits import submit
from tests.tiny_models import VOCAB_SIZE

BLOCK = 16


def run(
    model: object, prompts: list[list[int]], bits: int, rows: int
) -> tuple[list[list[int]], int]:
    """Return the answers to ``prompts``, ``rows`` of them at once, and the number of resizes."""
    precision = Precision(8 if bits == 8 else 16, 16)
    layout = probe_layout(model).with_precision(precision, dequantized=True)
    executor = BatchedExecutor(model, layout, BLOCK, GPUBatch)
    token_bytes = layout.slot_token_bytes + layout.array_bytes
    scheduler = Scheduler(
        SchedulerConfig(
            block_size=BLOCK,
            block_bytes=BLOCK * layout.block_token_bytes,
            slot_block_bytes=BLOCK * token_bytes,
            limit_bytes=1500 * token_bytes,
            context_length=512,
            max_batch_size=rows,
            prefill_batch_size=2,
            completion_batch_size=rows,
            namespace=b"test",
            look_ahead=True,
            shares_slabs=True,
            vocab_size=VOCAB_SIZE,
        )
    )
    answers: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
    waiting = deque(enumerate(prompts))
    pending: deque[PendingStep] = deque()
    resized = 0
    while waiting or not scheduler.idle:
        if waiting:
            number, tokens = waiting.popleft()
            scheduler.submit(submit(str(number), tokens, max_tokens=10 + number))
        plan = scheduler.schedule()
        if plan is not None:
            resized += len(plan.resized_slabs)
            pending.append(executor.dispatch(plan))
        if pending and (plan is None or len(pending) > 1):
            scheduler.apply(pending.popleft().read())
        scheduler.check_integrity()
        for delta in scheduler.take_outputs().deltas:
            assert delta.finish != "error", delta
            answers[delta.request_id] += delta.token_ids
    return [answers[str(i)] for i in range(len(prompts))], resized


@pytest.mark.parametrize("bits", [16, 8])
def test_answers_do_not_depend_on_slabs_that_grow_and_shrink_around_them(
    tiny_model: Callable[..., Path], bits: int
) -> None:
    ragged.install()
    model = mlx_lm.load(str(tiny_model("llama")))[0]
    prompts = [[(7 * i + j) % 200 + 3 for j in range(5 + 13 * i % 60)] for i in range(10)]
    alone, _ = run(model, prompts, bits, rows=1)
    together, resized = run(model, prompts, bits, rows=8)
    assert resized > 1
    assert together == alone
    assert [len(answer) for answer in together] == list(range(10, 20))
