"""The zoo: a few representative kinds, and that its comparison catches what it is for."""

from typing import Any

import mlx.core as mx
import pytest

from engine.batch import device
from engine.batch.dense import DenseBatch
from engine.batch.graph import GraphBatch
from engine.batch.ragged import RaggedBatch
from engine.cache.snapshots import SnapshotStore
from engine.cache.states import StateStore
from engine.proving import choose
from engine.zoo import examine as examining
from engine.zoo.build import build
from engine.zoo.common import VOCAB_SIZE
from engine.zoo.examine import ArchitectureReport, QuantizedReport, examine, examine_quantized
from engine.zoo.farm import examine_all


def found(name: str) -> ArchitectureReport:
    finding = examine(name)
    assert finding is not None
    return finding


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gemma4_text", "afm7"])
def test_models_of_plain_and_sliding_layers_are_batched_right(name: str) -> None:
    finding = found(name)
    assert finding.right, finding
    assert (finding.batching, finding.prefix_cache) == ("ragged", True)


@pytest.mark.parametrize("name", ["mamba", "recurrent_gemma", "falcon_h1", "qwen3_next"])
def test_models_with_recurrent_layers_are_batched_right(name: str) -> None:
    finding = found(name)
    assert finding.right, finding
    assert (finding.batching, finding.prefix_cache) == ("ragged", True)


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v32", "gemma2", "kimi_linear"])
def test_models_that_compute_with_their_keys_are_batched_right(name: str) -> None:
    finding = found(name)
    assert finding.right, finding
    assert finding.batching == "dense"


@pytest.mark.parametrize("name", ["gpt_bigcode", "llama4", "minimax_m3_vl"])
def test_models_with_one_position_for_all_rows_are_computed_row_by_row(name: str) -> None:
    finding = found(name)
    assert finding.right, finding
    assert (finding.batching, finding.batched, finding.prefix_cache) == ("row by row", False, True)


@pytest.mark.parametrize("name", ["deepseek_v41", "plamo3", "longcat_flash_ngram"])
def test_what_slots_cannot_hold_is_served_right_one_at_a_time(name: str) -> None:
    finding = found(name)
    assert finding.right, finding
    assert finding.batching == "one at a time" and finding.reason


def test_a_module_without_a_model_is_not_counted() -> None:
    assert examine("rope_utils") is None


def test_a_process_that_ends_or_hangs_ends_no_run() -> None:
    (slow,) = examine_all(["llama"], time_limit_s=0.01)
    assert not slow.right and "no answer" in slow.error
    after = list(examine_all(["olmo", "llama"]))  # importing the first one ends the process
    assert [(f.name, f.loads, f.right) for f in after] == [
        ("olmo", False, False),
        ("llama", True, True),
    ]


class TestTheComparisonCatches:
    """Without the proof, which would not let faulty batches pass. Each with keys and values as
    they are and in 8 bits, where that is compared in a way of its own."""

    kinds = pytest.mark.parametrize(
        ("name", "batch_class", "bits"),
        [
            (name, batch_class, bits)
            for bits in (16, 8)
            for name, batch_class in (
                ("llama", GraphBatch),
                ("gemma3_text", GraphBatch),
                ("granitemoe", GraphBatch),
                ("deepseek_v3", DenseBatch),
            )
        ],
    )
    recurrent = pytest.mark.parametrize(
        ("name", "bits"), [("mamba", 16), ("qwen3_next", 16), ("qwen3_next", 8)]
    )

    @pytest.fixture(autouse=True)
    def unproven(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(choose, "prove", lambda *_: None)

    def is_wrong(
        self, name: str, batch_class: type[RaggedBatch], bits: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(device, "batch_classes", lambda *_: [batch_class])
        if bits == 8:
            error = examine_quantized(build(name), VOCAB_SIZE).error
            assert error.startswith("INT8: ")
            assert "logits differ" in error or "than mlx-lm computes" in error
            return
        monkeypatch.setattr(examining, "examine_quantized", lambda *_: QuantizedReport())
        finding = found(name)
        assert finding.batching == batch_class.batching
        assert "logits differ" in finding.error

    @kinds
    def test_a_shifted_mask(
        self, name: str, batch_class: type[RaggedBatch], bits: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for owner, method in ((GraphBatch, "_make_mask"), (DenseBatch, "mask")):
            monkeypatch.setattr(owner, method, shifted(getattr(owner, method)))
        self.is_wrong(name, batch_class, bits, monkeypatch)

    @kinds
    def test_a_position_that_is_one_too_far(
        self, name: str, batch_class: type[RaggedBatch], bits: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        init = RaggedBatch.__init__

        def late(batch: Any, *args: Any) -> None:
            init(batch, *args)
            if len(batch.rows) == 3:
                batch.offset = batch.offset + mx.array([0, 1, 0])

        monkeypatch.setattr(RaggedBatch, "__init__", late)
        self.is_wrong(name, batch_class, bits, monkeypatch)

    @kinds
    def test_a_row_that_is_not_written(
        self, name: str, batch_class: type[RaggedBatch], bits: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What the slot's last user left is read instead."""
        write = GraphBatch.write

        def forgetful(batch: Any, layer: Any, keys: Any, values: Any) -> None:
            if not (batch.decoding and len(batch.rows) == 3 and layer == 1):
                write(batch, layer, keys, values)

        monkeypatch.setattr(GraphBatch, "write", forgetful)
        self.is_wrong(name, batch_class, bits, monkeypatch)

    @recurrent
    def test_state_of_another_row(
        self, name: str, bits: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        state = RaggedBatch.state

        def rolled(batch: Any, number: Any) -> Any:
            found = state(batch, number)
            return found if found is None else mx.roll(found, 1, axis=0)

        monkeypatch.setattr(RaggedBatch, "state", rolled)
        self.is_wrong(name, GraphBatch, bits, monkeypatch)

    @recurrent
    def test_state_that_the_slots_last_user_left(
        self, name: str, bits: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        state = RaggedBatch.state

        def stale(batch: Any, number: Any) -> Any:
            slots = [row.slot for row in batch.rows]
            if batch.rows[0].start == 0 and slots[0] in batch.slabs.states._by_slot:
                return batch.new_states.get(number, batch.slabs.states.get(number, slots))
            return state(batch, number)

        monkeypatch.setattr(RaggedBatch, "state", stale)
        self.is_wrong(name, GraphBatch, bits, monkeypatch)

    @recurrent
    def test_a_snapshot_of_another_row(
        self, name: str, bits: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        own = StateStore.copy_of

        def wrong(store: Any, slot: Any) -> Any:
            others = [other for other in store._by_slot if other != slot]
            return own(store, others[0] if others else slot)

        monkeypatch.setattr(StateStore, "copy_of", wrong)
        self.is_wrong(name, GraphBatch, bits, monkeypatch)

    @recurrent
    def test_a_snapshot_that_is_not_brought_back(
        self, name: str, bits: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The state of the slot goes on instead."""

        def forgetful(store: Any, slot: Any, snapshot: Any) -> Any:
            if slot not in store._states._by_slot:
                return store.reset(slot)
            return []

        monkeypatch.setattr(SnapshotStore, "restore", forgetful)
        self.is_wrong(name, GraphBatch, bits, monkeypatch)


def shifted(make: Any) -> Any:
    def make_shifted(*args: Any) -> Any:
        mask = make(*args)
        return mx.roll(mask, 1, axis=-1) if isinstance(mask, mx.array) else mask

    return make_shifted


def test_the_same_seed_gives_the_same_weights() -> None:
    tokens = mx.array([[5, 6, 7]])
    one, same, other = (build("llama", seed)(tokens) for seed in (1, 1, 2))
    assert mx.array_equal(one, same) and not mx.array_equal(one, other)
