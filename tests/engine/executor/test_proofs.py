"""The proof that a batch class gives mlx-lm's logits, and faults that it has to notice."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from engine.batch import ragged
from engine.batch.cpu.decoder import DecoderBatch
from engine.batch.graph import GraphBatch
from engine.cache.layout import UnsupportedLayout, probe_layout
from engine.proving.proof import NotBatchable, proof_references
from engine.proving.proof import prove as prove_with
from engine.zoo.build import build
from tests.engine.conftest import Wrap
from tests.engine.executor.by_hand import bound
from tests.tiny_models import VOCAB_SIZE


@pytest.fixture
def through_views(batch_class: type[ragged.RaggedBatch]) -> None:
    """Skip tests that break the views of MLX's layers if no such layer runs."""
    if batch_class is DecoderBatch:
        pytest.skip("no layer of MLX runs; see batch/cpu/test_decoder.py")


def prove(model: Any, batch_class: type[ragged.RaggedBatch]) -> None:
    layout = probe_layout(model)
    batch_class = bound(model, layout, batch_class)
    prove_with(model, layout, batch_class, proof_references(model, layout, VOCAB_SIZE))


def test_the_proof_accepts_models_of_plain_and_sliding_layers(
    model: Any, batch_class: type[ragged.RaggedBatch]
) -> None:
    prove(model, batch_class)


@pytest.mark.usefixtures("through_views")
def test_the_proof_notices_a_wrong_position(
    model: Any, batch_class: type[ragged.RaggedBatch], wrap: Wrap
) -> None:
    @wrap(ragged.RaggedBatch, "kv_view")
    def moved(view_of: Any, *args: Any) -> Any:
        view = view_of(*args)
        view.offset = view.offset * 2
        return view

    with pytest.raises(NotBatchable):
        prove(model, batch_class)


def test_the_proof_notices_a_shifted_mask(model: Any, wrap: Wrap) -> None:
    layout = probe_layout(model)
    references = proof_references(model, layout, VOCAB_SIZE)  # mlx-lm's, with the right masks

    @wrap(mx.fast, "scaled_dot_product_attention")
    def shifted(attend: Any, *args: Any, mask: Any, **fields: Any) -> mx.array:
        mask = mx.roll(mask, 1, axis=-1) if isinstance(mask, mx.array) else mask
        return attend(*args, mask=mask, **fields)

    with pytest.raises(NotBatchable, match="logits differ"):
        prove_with(model, layout, GraphBatch, references)


@pytest.mark.usefixtures("through_views")
def test_the_proof_notices_a_stale_row(
    model: Any, batch_class: type[ragged.RaggedBatch], wrap: Wrap
) -> None:
    @wrap(batch_class, "write")
    def late(write: Any, batch: Any, layer: Any, keys: mx.array, values: mx.array) -> None:
        write(batch, layer, mx.roll(keys, 1, axis=0), values)

    with pytest.raises(NotBatchable):
        prove(model, batch_class)


def test_slots_do_not_hold_state_that_grows() -> None:
    with pytest.raises(UnsupportedLayout, match="layer 0 keeps growing state"):
        probe_layout(build("longcat_flash_ngram"))
