"""Plans made by hand, without a scheduler, and what mlx-lm gives for the same tokens."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.models.cache import make_prompt_cache

from engine.batch import ragged
from engine.cache.layout import Layout, probe_layout
from engine.cpu.decoder.decoder import DecoderBatch, bind
from engine.executor.base import PendingStep
from engine.executor.batched import BatchedExecutor
from engine.plan import Chunk, Decode, Plan, Slot, StepResult, Table, Unpack, fixed_tables
from shared.wire import SamplingParams, TokenLogprobs
from tests.engine.sampling.test_penalties import mlx_lm_logits
from tests.tiny_models import VOCAB_SIZE

GREEDY = SamplingParams(seed=1)
PAGE = 16
"""Positions of a page: few, so that sequences have several."""
_alone: dict[tuple[int, ...], list[int]] = {}


@cache
def load(path: Path) -> Any:
    """Return the model in ``path``, which is kept for other tests."""
    ragged.install()
    return mlx_lm.load(str(path))[0]


def prompt(seed: int, length: int) -> list[int]:
    return mx.random.randint(3, VOCAB_SIZE, (length,), key=mx.random.key(seed)).tolist()


def alone(model: Any, tokens: list[int], count: int) -> list[int]:
    """Return mlx-lm's tokens, computed once for all kinds of batches."""
    key = id(model), count, *tokens
    if key not in _alone:
        _alone[key] = _computed_alone(model, tokens, count)
    return _alone[key]


def _computed_alone(model: Any, tokens: list[int], count: int) -> list[int]:
    cache = make_prompt_cache(model)
    out: list[int] = []
    if len(tokens) > 1:
        model(mx.array([tokens[:-1]]), cache=cache)
    last = tokens[-1]
    for _ in range(count):
        last = int(mx.argmax(model(mx.array([[last]]), cache=cache)[0, -1]))
        out.append(last)
    return out


PENALTIES: dict[str, Any] = {
    "repetition_penalty": 1.4,
    "repetition_context_size": 9,
    "presence_penalty": 0.3,
    "frequency_penalty": 0.2,
    "logit_bias": [(40, 1.5), (41, -2.0)],
}
PENALIZED = SamplingParams(seed=1, **PENALTIES)


def penalized(model: Any, tokens: list[int], count: int) -> list[int]:
    """Return the tokens of `alone` with mlx-lm's logits processors."""
    cache = make_prompt_cache(model)
    model(mx.array([tokens[:-1]]), cache=cache)
    out: list[int] = []
    for _ in range(count):
        logits = model(mx.array([[(tokens + out)[-1]]]), cache=cache)[0, -1]
        logits = mlx_lm_logits(logits, tokens + out, len(tokens), PENALTIES)
        out.append(int(mx.argmax(logits)))
    return out


def direct_logprobs(model: Any, tokens: list[int]) -> mx.array:
    """Return log-probabilities (len(tokens), vocab) of the token after each of ``tokens``."""
    logits = model(mx.array([tokens]), cache=make_prompt_cache(model))[0]
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def assert_logprobs(ours: TokenLogprobs, direct: mx.array, chosen: int) -> None:
    assert ours.chosen == pytest.approx(direct[chosen].item(), abs=2e-4)
    best = mx.sort(-direct)[: len(ours.top)].tolist()
    assert ours.top == pytest.approx([-value for value in best], abs=2e-4)
    assert ours.top == pytest.approx([direct[i].item() for i in ours.top_ids], abs=2e-4)


def chunk(slot: Slot, tokens: list[int]) -> Chunk:
    """Return the chunk of all but the last of ``tokens``."""
    return Chunk(slot, 0, tuple(tokens[:-1]))


def next_decode(
    slot: Slot, prompt: list[int], index: int, sampling: SamplingParams = GREEDY, **fields: Any
) -> Decode:
    """Return the decode for output ``index`` after ``prompt``. The host does not know outputs."""
    token = None if index else prompt[-1]
    return Decode(slot, len(prompt) - 1 + index, token, index, sampling, **fields)


class PlanRunner:
    """Drives an executor with plans made by hand, without a scheduler."""

    def __init__(self, executor: Any, rows: int, capacity: int) -> None:
        """Give each slot below ``rows`` pages for ``capacity`` tokens, and every second one values
        outside of pages too, if the executor can use them."""
        self.executor, self.step = executor, 0
        tables = fixed_tables(rows, capacity, executor.spec.page_tokens)
        unpacks = executor.spec.unpacked_token_bytes > 0
        self.run(
            num_pages=sum(len(table.pages) for table in tables),
            tables=tables,
            unpacked=tuple(Unpack(slot, capacity) for slot in range(0, rows, 2) if unpacks),
        )

    def share(self, source: Slot, target: Slot, pages: int) -> None:
        """Let ``target`` read the first pages of ``source`` instead of its own."""
        tables = self.executor._slots.tables
        self.run(tables=(Table(target, 0, (*tables[source][:pages], *tables[target][pages:])),))

    def dispatch(self, **parts: Any) -> PendingStep:
        self.step += 1
        pending: PendingStep = self.executor.dispatch(Plan(step=self.step, **parts))
        return pending

    def run(self, **parts: Any) -> StepResult:
        return self.dispatch(**parts).read()


class Runner(PlanRunner):
    """Drives a batched executor of one class."""

    batch_class: type[ragged.RaggedBatch]

    def __init__(self, model: Any, rows: int = 4, capacity: int = 128) -> None:
        layout = probe_layout(model)
        batch_class = bound(model, layout, self.batch_class)
        executor = BatchedExecutor(model, layout, PAGE, batch_class)
        super().__init__(executor, rows, capacity)

    def prefill(self, slot: Slot, tokens: list[int], start: int = 0) -> None:
        self.run(chunks=(Chunk(slot, start, tuple(tokens)),))

    def decode(self, *inputs: tuple[Slot, int, int | None, int]) -> tuple[int, ...]:
        return self.run(decodes=tuple(Decode(*each, GREEDY) for each in inputs)).tokens

    def generate(self, slot: Slot, tokens: list[int], count: int, known: bool) -> list[int]:
        out: list[int] = []
        for index in range(count):
            token = tokens[-1] if index == 0 else out[-1] if known else None
            out += self.decode((slot, len(tokens) - 1 + index, token, index))
        return out


def bound(
    model: Any, layout: Layout, batch_class: type[ragged.RaggedBatch]
) -> type[ragged.RaggedBatch]:
    if batch_class is not DecoderBatch:
        return batch_class
    return bind(model, layout) or pytest.skip("not of this family")
