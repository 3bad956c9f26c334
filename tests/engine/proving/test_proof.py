"""The proof in 16 bits: rounding as on a GPU passes, wrong batches do not.

MLX's matmuls on a CPU give a row the same bits in any batch. So sums are split here when there
are several rows, as other kernels do on a GPU. On the GPU's path and on the CPU's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import mlx.core as mx
import pytest
from mlx import nn

from engine import device
from engine.backend.gpu_path import forced_gpu_path
from engine.batch.ragged import RaggedBatch
from engine.cache.layout import Layout, probe_layout
from engine.cache.quantization import Precision
from engine.executor.batched import BatchedExecutor
from engine.proving import proof
from engine.proving.choose import choose_executor
from engine.proving.oracle import Reference, rounding_noise
from engine.proving.proof import NotBatchable, proof_references, prove
from engine.proving.trial import DRAFTED, Trial
from tests.engine.conftest import Wrap
from zoo.build import build
from zoo.common import VOCAB_SIZE

MORE = "qwen2 qwen3 gemma2 phi3 olmo2 glm4 cohere lfm2 starcoder2 mamba".split()
BFLOAT, FLOAT = DTYPES = (mx.bfloat16, mx.float16)
BLOCK = 16
PAIRWISE = [
    *(("gpu", "llama", BFLOAT), ("gpu", "gemma3_text", FLOAT)),
    *(("cpu", "llama", FLOAT), ("cpu", "gemma3_text", BFLOAT)),
]
"""Paths, models and types."""


@pytest.fixture(autouse=True)
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    device.prepare()
    name = getattr(request, "param", "gpu")
    with forced_gpu_path() if name == "gpu" else nullcontext():
        yield name


@pytest.fixture(autouse=True)
def rounding_depends_on_rows(wrap: Wrap) -> None:
    @wrap(nn.Linear, "__call__")
    def split(plain: Callable[..., mx.array], linear: Any, x: mx.array) -> mx.array:
        half = x.shape[-1] // 2
        if x.size == x.shape[-1] or x.dtype == mx.float32:
            return plain(linear, x)
        weight = linear.weight.T
        out = x[..., :half] @ weight[:half] + x[..., half:] @ weight[half:]
        return out + linear.bias if "bias" in linear else out


class Tried(NamedTuple):
    """A model, its fastest batches, and what mlx-lm gives for the sequences of a proof."""

    model: Any
    layout: Layout
    batch_class: type[RaggedBatch]
    given: list[Reference]

    def prove(self) -> None:
        prove(*self)


def built(name: str, dtype: mx.Dtype) -> Any:
    model = build(name)
    model.set_dtype(dtype)
    return model


def tried(model: Any) -> Tried:
    layout = probe_layout(model)
    (batch_class, *_) = device.batch_classes(model, layout)
    return Tried(model, layout, batch_class, proof_references(model, layout, VOCAB_SIZE))


@pytest.mark.parametrize(
    ("path", "name", "dtype"),
    [*PAIRWISE, *(("gpu", name, DTYPES[i % 2]) for i, name in enumerate(MORE))],
    indirect=["path"],
)
def test_models_in_16_bits_are_batched(path: str, name: str, dtype: mx.Dtype) -> None:
    executor, reason, _ = choose_executor(built(name, dtype), VOCAB_SIZE, BLOCK, Precision(8))
    assert isinstance(executor, BatchedExecutor)
    assert executor.spec.batching == ("dense" if name == "gemma2" else "ragged"), reason
    assert executor.spec.look_ahead == (path == "gpu")


def test_a_few_steps_of_large_logits_pass() -> None:
    """All logits of a position have a large part in common. Then two or three steps of bfloat16
    are more than a tenth of their spread."""
    model = build("llama")
    model.lm_head.weight = model.lm_head.weight + mx.random.normal((1, 64), key=mx.random.key(1))
    model.set_dtype(mx.bfloat16)
    large = tried(model)
    trial = Trial(BatchedExecutor(large.model, large.layout, BLOCK, large.batch_class))
    trial.run_short(large.given)
    assert trial.max_difference > 0.1
    large.prove()


def test_noise_of_mlx_lms_own_two_ways_passes_and_more_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    subject = tried(built("glm4", mx.bfloat16))
    noise = rounding_noise(subject.model, subject.given, subject.layout.precision)
    step = max(one.largest_step(mx.bfloat16) for one in subject.given)
    assert step < noise
    for factor in (0.9, 1.1):
        found = factor * proof.NOISE_MULTIPLE * noise

        def run_short(trial: Trial, _: object, found: float = found) -> None:
            trial.max_difference = found

        monkeypatch.setattr(Trial, "run_short", run_short)
        with nullcontext() if factor < 1 else pytest.raises(NotBatchable):
            subject.prove()


def is_noticed(subject: Tried) -> None:
    with pytest.raises(NotBatchable, match="logits differ"):
        subject.prove()


@pytest.mark.parametrize(("path", "name", "dtype"), PAIRWISE, indirect=["path"])
class TestTheProofNotices:
    @pytest.fixture
    def subject(self, name: str, dtype: mx.Dtype) -> Tried:
        return tried(built(name, dtype))

    def test_a_position_that_is_one_too_far(self, subject: Tried, wrap: Wrap) -> None:
        @wrap(RaggedBatch, "__init__")
        def late(init: Any, batch: Any, *args: Any) -> None:
            init(batch, *args)
            if len(batch.rows) == 2:
                batch.offset = batch.turned_by = batch.offset + mx.array([0, 1])

        is_noticed(subject)

    def test_a_row_that_is_not_written(self, subject: Tried, wrap: Wrap) -> None:
        @wrap(subject.batch_class, "write")
        def forgetful(write: Any, batch: Any, *new: Any) -> None:
            if not (batch.decoding and len(batch.rows) == 2):
                write(batch, *new)

        is_noticed(subject)

    def test_keys_of_another_row(self, subject: Tried, wrap: Wrap) -> None:
        @wrap(subject.batch_class, "write")
        def rolled(write: Any, batch: Any, layer: int, keys: mx.array, values: mx.array) -> None:
            write(batch, layer, mx.roll(keys, 1, axis=0), values)

        is_noticed(subject)

    def test_drafts_whose_queries_are_lost(self, subject: Tried, wrap: Wrap) -> None:
        @wrap(subject.batch_class, "attend")
        def lost(attend: Any, batch: Any, layer: int, query: mx.array, *more: Any) -> mx.array:
            if [row.width for row in batch.rows] == [DRAFTED + 2, 2]:
                query = query * 0
            return attend(batch, layer, query, *more)

        is_noticed(subject)

    def test_a_shifted_mask(self, subject: Tried, wrap: Wrap) -> None:
        @wrap(mx.fast, "scaled_dot_product_attention")
        def shifted(attend: Any, *args: Any, mask: Any, **fields: Any) -> mx.array:
            mask = mx.roll(mask, 1, axis=-1) if isinstance(mask, mx.array) else mask
            return attend(*args, mask=mask, **fields)

        is_noticed(subject)
