"""The proof that a batch class gives mlx-lm's logits; see also `tests.engine.proving`."""

from __future__ import annotations

from typing import Any

import pytest

from engine.batch import ragged
from engine.cache.layout import UnsupportedLayout, probe_layout
from engine.proving.proof import proof_references, prove
from tests.engine.executor.by_hand import bound
from tests.engine.executor.conftest import every_pair
from tests.tiny_models import VOCAB_SIZE
from zoo.build import build


@every_pair
def test_the_proof_accepts_models_of_plain_and_sliding_layers(
    model: Any, batch_class: type[ragged.RaggedBatch]
) -> None:
    layout = probe_layout(model)
    batch_class = bound(model, layout, batch_class)
    prove(model, layout, batch_class, proof_references(model, layout, VOCAB_SIZE))


def test_slots_do_not_hold_state_that_grows() -> None:
    with pytest.raises(UnsupportedLayout, match="layer 0 keeps growing state"):
        probe_layout(build("longcat_flash_ngram"))
