"""The zoo: a few representative kinds, and the faults that its comparison must catch."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from engine import device
from engine.backend.gpu_path import forced_gpu_path
from engine.batch.dense import DenseBatch
from engine.batch.graph import GraphBatch
from engine.batch.ragged import RaggedBatch
from engine.cache.graph_pages import GraphPages
from engine.cache.snapshots import SnapshotStore
from engine.cache.states import StateStore
from engine.executor.base import PendingStep
from engine.executor.batched import BatchedExecutor
from engine.plan import Plan, Slot
from engine.proving import choose, trial
from tests.e2e.ranks.test_ranks import at_length
from tests.engine.conftest import Wrap
from zoo import examine as examining
from zoo.build import build
from zoo.common import VOCAB_SIZE
from zoo.examine import ArchitectureReport, QuantizedReport, examine, examine_quantized
from zoo.farm import Way, examine_all

pytestmark = pytest.mark.slow


def found(name: str) -> ArchitectureReport:
    report = examine(name)
    assert report is not None
    return report


BATCHED = {
    "ragged": (  # plain and sliding layers, and recurrent ones
        *("llama", "gemma3_text", "gemma4_text", "mamba", "recurrent_gemma", "qwen3_next"),
    ),
    "dense": ("deepseek_v32", "kimi_linear"),  # which compute with their keys
    "row by row": ("gpt_bigcode", "llama4", "minimax_m3_vl"),  # one position for all rows
    "one at a time": ("deepseek_v41", "plamo3", "longcat_flash_ngram"),  # slots cannot hold these
}


@pytest.mark.parametrize(
    ("batching", "name"), [(batching, name) for batching in BATCHED for name in BATCHED[batching]]
)
def test_models_are_computed_correctly_in_the_way_that_their_layers_allow(
    batching: str, name: str
) -> None:
    report = found(name)
    assert report.right, report
    assert report.batching == batching
    assert report.prefix_cache or batching in ("dense", "one at a time")
    assert not report.batched or batching != "row by row"
    assert report.reason or batching != "one at a time"


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_next", "deepseek_v3"])
def test_models_are_batched_correctly_as_on_a_gpu(name: str) -> None:
    """With pages whose number changes, and look-ahead."""
    with forced_gpu_path():
        report = found(name)
    assert report.right and report.batched, report


@at_length
def test_a_hybrid_is_divided_between_two_ranks_as_on_a_gpu() -> None:
    """And a model that mlx-lm cannot divide is not counted as wrong."""
    whole, divided = examine_all(["mamba", "qwen3_5"], way=Way(gpu_path=True, ranks=2))
    assert not whole.loads and not whole.error
    assert divided.right and divided.int8 and divided.batching == "ragged", divided


def test_a_module_without_a_model_is_not_counted() -> None:
    assert examine("rope_utils") is None


def test_a_process_that_crashes_or_hangs_does_not_end_the_run() -> None:
    (slow,) = examine_all(["llama"], time_limit_s=0.01)
    assert not slow.right and "no answer" in slow.error
    after = list(examine_all(["olmo", "llama"]))  # importing the first one ends the process
    assert [(f.name, f.loads, f.right) for f in after] == [
        ("olmo", False, False),
        ("llama", True, True),
    ]


BatchKind = tuple[str, type[RaggedBatch], int]
"""An architecture, how it is batched, and the bits of its keys and values."""
ATTENDING: list[BatchKind] = [
    *(("llama", GraphBatch, 16), ("gemma3_text", GraphBatch, 8)),
    *(("granitemoe", GraphBatch, 16), ("deepseek_v3", DenseBatch, 8)),
]
RECURRENT: list[BatchKind] = [("mamba", GraphBatch, 16), ("qwen3_next", GraphBatch, 8)]
Check = Callable[[], None]


def compared(cases: list[BatchKind]) -> pytest.MarkDecorator:
    ids = [f"{name}, {bits} bits" for name, _, bits in cases]
    return pytest.mark.parametrize("is_wrong", cases, ids=ids, indirect=True)


class TestTheComparisonCatches:
    """Without the proof, which would rule faulty batches out. Each fault is tried with plain keys
    and values, and with those in 8 bits, which are compared in another way."""

    @pytest.fixture
    def is_wrong(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Check:
        """Return a function that checks that an error is found."""
        device.prepare()  # a run in 8 bits does not
        name, batch_class, bits = request.param
        monkeypatch.setattr(choose, "prove", lambda *_: None)
        monkeypatch.setattr(device, "batch_classes", lambda *_: [batch_class])

        def check() -> None:
            if bits == 8:
                error = examine_quantized(build(name), VOCAB_SIZE).error
                assert error.startswith("INT8: ")
                assert "logits differ" in error or "that differ from mlx-lm's" in error
                return
            monkeypatch.setattr(examining, "examine_quantized", lambda *_: QuantizedReport())
            report = found(name)
            assert report.batching == batch_class.batching
            assert "logits differ" in report.error

        return check

    @pytest.fixture
    def slots_with_state(self, wrap: Wrap) -> dict[StateStore, list[Slot]]:
        slots_of: dict[StateStore, list[Slot]] = {}

        @wrap(StateStore, "put")
        def recorded(put: Any, store: StateStore, slots: Any, arrays: Any) -> list[mx.array]:
            known = slots_of.setdefault(store, [])
            known += [slot for slot in slots if slot not in known]
            return put(store, slots, arrays)

        return slots_of

    def test_pages_that_are_lost_when_others_are_added(
        self, wrap: Wrap, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        @wrap(GraphPages, "resize")
        def lossy(resize: Any, pages: GraphPages, num_pages: int) -> None:
            resize(pages, num_pages)
            if num_pages > trial.PAGES + 2:
                for page in range(trial.PAGES):
                    pages.copy(trial.PAGES + 3, page, trial.PAGE_TOKENS)

        monkeypatch.setattr(examining, "examine_quantized", lambda *_: QuantizedReport())
        with forced_gpu_path():
            assert "looking ahead: logits differ" in found("llama").error

    @compared(ATTENDING)
    def test_a_shifted_mask(
        self, is_wrong: Check, wrap: Wrap, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        attend = mx.fast.scaled_dot_product_attention

        def shifted(*args: Any, mask: Any, **fields: Any) -> mx.array:
            mask = mx.roll(mask, 1, axis=-1) if isinstance(mask, mx.array) else mask
            return attend(*args, mask=mask, **fields)

        @wrap(BatchedExecutor, "dispatch")
        def faulty(dispatch: Any, executor: BatchedExecutor, plan: Plan) -> PendingStep:
            with monkeypatch.context() as only_here:  # mlx-lm's own masks stay right
                only_here.setattr(mx.fast, "scaled_dot_product_attention", shifted)
                return dispatch(executor, plan)

        is_wrong()

    @compared(ATTENDING)
    def test_a_position_that_is_one_too_far(self, is_wrong: Check, wrap: Wrap) -> None:
        @wrap(RaggedBatch, "__init__")
        def late(init: Any, batch: Any, *args: Any) -> None:
            init(batch, *args)
            if len(batch.rows) == 3:
                batch.offset = batch.turned_by = batch.offset + mx.array([0, 1, 0])

        is_wrong()

    @compared(ATTENDING)
    def test_a_row_that_is_not_written(self, is_wrong: Check, wrap: Wrap) -> None:
        """The row of the slot's last user is read instead."""

        @wrap(GraphBatch, "write")
        def forgetful(write: Any, batch: Any, layer: Any, keys: Any, values: Any) -> None:
            if not (batch.decoding and len(batch.rows) == 3 and layer == 1):
                write(batch, layer, keys, values)

        is_wrong()

    @compared(RECURRENT)
    def test_state_of_another_row(self, is_wrong: Check, wrap: Wrap) -> None:
        @wrap(RaggedBatch, "state")
        def rolled(state: Any, batch: Any, number: Any) -> Any:
            found = state(batch, number)
            return found if found is None else mx.roll(found, 1, axis=0)

        is_wrong()

    @compared(RECURRENT)
    def test_state_that_the_slots_last_user_left(
        self, is_wrong: Check, wrap: Wrap, slots_with_state: dict[StateStore, list[Slot]]
    ) -> None:
        @wrap(RaggedBatch, "state")
        def stale(state: Any, batch: Any, number: Any) -> Any:
            states, slots = batch.slots.states, [row.slot for row in batch.rows]
            if batch.rows[0].start == 0 and slots[0] in slots_with_state.get(states, []):
                return batch.new_states.get(number, states.get(number, slots))
            return state(batch, number)

        is_wrong()

    @compared(RECURRENT)
    def test_a_snapshot_of_another_row(
        self, is_wrong: Check, wrap: Wrap, slots_with_state: dict[StateStore, list[Slot]]
    ) -> None:
        @wrap(StateStore, "copy_of")
        def wrong(own: Any, store: Any, slot: Any) -> Any:
            others = [other for other in slots_with_state[store] if other != slot]
            return own(store, others[0] if others else slot)

        is_wrong()

    @compared(RECURRENT)
    def test_a_snapshot_that_is_not_brought_back(
        self, is_wrong: Check, wrap: Wrap, slots_with_state: dict[StateStore, list[Slot]]
    ) -> None:
        """The slot's own state continues instead."""

        @wrap(SnapshotStore, "restore")
        def forgetful(restore: Any, store: Any, slot: Any, snapshot: Any) -> Any:
            if not any(slot in slots for slots in slots_with_state.values()):
                return store.reset(slot)
            return []

        is_wrong()


def test_the_same_seed_gives_the_same_weights() -> None:
    tokens = mx.array([[5, 6, 7]])
    one, same, other = (build("llama", seed)(tokens) for seed in (1, 1, 2))
    assert mx.array_equal(one, same) and not mx.array_equal(one, other)
