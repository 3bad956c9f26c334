"""The store of recurrent state: the state of each slot, and the arrays that stay alive."""

from typing import Any

import mlx.core as mx
import pytest

from engine.cache.layout import Layout, StateLayout
from engine.cache.snapshots import SnapshotStore
from engine.cache.states import StateStore
from engine.executor.batched import BatchedExecutor
from engine.plan import Chunk, Decode, Export, RestoreState, SaveState, Slot
from engine.proving.choose import choose_executor
from tests.engine.executor.by_hand import GREEDY, PlanRunner
from zoo.build import build

A, B, C = 0, 1, 2
NO_TOKEN: Any = "x"  # MLX raises where it is computed


def rows(*numbers: int) -> list[mx.array]:
    return [mx.array([[float(n), float(n)] for n in numbers])]


def values(store: StateStore, *slots: Slot) -> list[float]:
    return store.get(0, slots)[:, 0].tolist()


def test_each_slot_has_its_own_state_in_any_batch() -> None:
    store = StateStore()
    store.put((A, B, C), rows(1, 2, 3))
    assert values(store, C, A) == [3, 1]
    store.put((C, A), rows(30, 10))
    assert values(store, A, B, C) == [10, 2, 30]


def test_the_state_of_a_batch_that_stays_the_same_is_not_copied() -> None:
    store = StateStore()
    (touched,) = store.put((A, B), rows(1, 2))
    assert store.get(0, (A, B)) is touched
    assert store.get(0, (B, A)) is not touched


def test_a_slot_that_is_left_behind_keeps_its_own_row_only() -> None:
    store = StateStore()
    wide = [mx.zeros((2, 1 << 20))]
    mx.eval(store.put((A, B), wide))
    mx.eval(store.put((A,), [mx.zeros((1, 1 << 20))]))
    del wide
    mx.clear_cache()
    before = mx.get_active_memory()
    store.free(A)
    store.free(B)
    assert before - mx.get_active_memory() == 2 * 4 << 20


def test_freeing_a_slot_drops_its_state() -> None:
    store = StateStore()
    store.put((A, C), rows(1, 3))
    store.free(A)
    assert values(store, C) == [3]
    with pytest.raises(KeyError):
        store.get(0, (A,))


def test_a_snapshot_does_not_follow_its_slot_and_pins_its_own_row_only() -> None:
    layout = Layout((), (StateLayout((1 << 20,), mx.float32),), ())
    states = StateStore()
    snapshots = SnapshotStore(layout, states)
    mx.eval(states.put((A, B), [mx.stack([mx.zeros(1 << 20), mx.ones(1 << 20)])]))
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.eval(snapshots.save(B, 1))
    states.free(A)
    states.free(B)
    assert mx.get_active_memory() - before == -4 << 20
    states.put((A,), [mx.full((1, 1 << 20), 7.0)])
    copied = tuple(bytes(part) for part in snapshots.exporter(1)())
    snapshots.insert(2, copied)
    for number, slot in ((1, A), (2, C)):
        snapshots.restore(slot, number)
        assert mx.all(states.get(0, (slot,)) == 1).item()
        snapshots.evict(number)
        assert number not in snapshots
    assert mx.all(states.get(0, (A,)) == 1).item()


@pytest.mark.parametrize("name", ["mamba", "jamba"])
def test_only_a_sequence_whose_snapshot_is_missing_fails(name: str) -> None:
    """With look-ahead a plan may restore a snapshot that the plan before it failed to save."""
    runner, alone = (
        PlanRunner(choose_executor(build(name), 320, 64).executor, 3, 64) for _ in range(2)
    )
    for each in (runner, alone):
        each.run(chunks=(Chunk(B, 0, tuple(range(5, 21))),))
    result = runner.run(chunks=(Chunk(A, 0, (1, 2, NO_TOKEN)),), state_saves=(SaveState(A, 16, 1),))
    assert [slot for slot, _ in result.failed] == [A]
    result = runner.run(
        state_restores=(RestoreState(C, 16, 1),),
        decodes=(Decode(B, 16, 9, 0, GREEDY), Decode(C, 16, 9, 0, GREEDY)),
        state_saves=(SaveState(B, 17, 2), SaveState(C, 17, 3)),
        exports=(Export(2), Export(3)),
    )
    assert [slot for slot, _ in result.failed] == [C]
    assert [one.block_id for one in result.exported] == [2]
    assert result.tokens[:1] == alone.run(decodes=(Decode(B, 16, 9, 0, GREEDY),)).tokens


def test_a_chunk_that_raises_leaves_the_state_of_others_alone() -> None:
    runner = PlanRunner(choose_executor(build("mamba"), 320, 64).executor, 2, 64)
    assert isinstance(runner.executor, BatchedExecutor)

    def tokens(bad: bool) -> list[int]:
        said: list[int] = []
        chunks = [Chunk(B, 0, (7, 8, 9))] + [Chunk(A, 0, (1, 2, NO_TOKEN))] * bad
        runner.run(chunks=tuple(chunks))
        for index in range(4):
            token = said[-1] if said else 10
            said += runner.run(decodes=(Decode(B, 3 + index, token, index, GREEDY),)).tokens
        runner.run(freed_slots=(A, B))
        return said

    assert tokens(bad=True) == tokens(bad=False)
