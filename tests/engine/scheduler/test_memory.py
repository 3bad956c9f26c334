"""Pages, states and snapshots under one limit. What holds after any operations is in
`test_memory_properties.py`."""

from __future__ import annotations

from typing import Any

import pytest

from engine.plan import CopyPage, Table, Unpack
from engine.scheduler.memory import FIRST_TOKENS, Memory
from engine.scheduler.planning.plan_builder import InFlightStep
from engine.scheduler.pools.ledger import STEPS_TO_RAISE, Ledger
from engine.scheduler.scheduler import discard_failed
from engine.scheduler.sequences.sequence import Sequence
from tests.engine.scheduler.harness import config, sequence

PAGE = 16
BYTES = 4000  # of a page


def memory_of(pages: int, **changes: Any) -> Memory:
    return Memory(config(blocks=4 * pages, **changes))


def begin(memory: Memory, tokens: int, name: int = 0) -> Sequence:
    """Return a sequence with pages for so many tokens of its own."""
    seq = sequence([name, *range(tokens - 1)], 4)
    seq.slot = memory.take_slot()
    memory.begin(seq)
    assert memory.grow(seq, tokens)
    return seq


def leave_cached(memory: Memory, pages: int, name: int) -> None:
    """Leave pages of a sequence that has ended, each under a hash of its own."""
    seq = begin(memory, pages * PAGE, name)
    for number, page in enumerate(seq.pages):
        memory.pages.name(page, PAGE, b"%d/%d" % (name, number))
    memory.release(seq)
    assert seq.slot is not None
    memory.release_slot(seq.slot)


def numbers(seq: Sequence) -> list[int]:
    return [page.number for page in seq.pages]


def test_the_ledger_never_goes_over_its_limit() -> None:
    ledger = Ledger(100)
    ledger.reserve(60)
    assert ledger.shortfall(40) == 0 and ledger.shortfall(41) == 1
    with pytest.raises(RuntimeError):
        ledger.reserve(41)


def test_a_limit_that_was_lowered_is_raised_again_after_many_steps() -> None:
    """Another program may have used the memory for a while."""
    ledger = Ledger(1000)
    ledger.reserve(600)
    ledger.ran_out(least_bytes=100)
    ledger.ran_out(least_bytes=100)
    assert ledger.limit_bytes == 810
    for _ in range(4 * STEPS_TO_RAISE - 1):
        ledger.step_succeeded()
    assert ledger.limit_bytes == 810
    ledger.step_succeeded()
    assert ledger.limit_bytes == 910
    ledger.ran_out(least_bytes=100)
    lowered = ledger.limit_bytes
    for _ in range(4 * STEPS_TO_RAISE):
        ledger.step_succeeded()
    assert ledger.limit_bytes == lowered, "it waits longer each time"
    for _ in range(30 * STEPS_TO_RAISE):
        ledger.step_succeeded()
    assert ledger.limit_bytes == 1000


def test_pages_are_added_by_half_and_not_beyond_the_limit() -> None:
    memory = memory_of(1000)
    first = FIRST_TOKENS // PAGE
    sizes = []
    for number in range(900):
        begin(memory, PAGE, number % 2) if number < 8 else memory.pages.take()
        if memory.pages.num_free == 0:
            memory._make_pages(1, 0)
        sizes.append(memory.pages.num_pages)
    assert sorted({*sizes}) == [first, first * 3 // 2, first * 9 // 4, first * 27 // 8, 1000]


def test_free_pages_are_used_from_the_lowest_number_on() -> None:
    memory = memory_of(10)
    seqs = [begin(memory, 2 * PAGE, number) for number in range(4)]
    memory.release(seqs[1])
    assert numbers(begin(memory, PAGE)) == [2]


def test_free_pages_are_given_back_before_anything_is_evicted() -> None:
    memory = memory_of(10)
    leave_cached(memory, 6, name=1)
    assert memory.reserve_pass(4 * BYTES)
    assert (memory.pages.num_pages, memory.pages.num_cached) == (6, 6)
    assert memory.reserve_pass(2 * BYTES)
    assert (memory.pages.num_pages, memory.pages.num_cached) == (4, 4)
    assert b"1/0" in memory.pages, "the end of a prefix is evicted first"


def test_nothing_is_evicted_for_what_does_not_fit_anyway() -> None:
    memory = memory_of(8)
    begin(memory, 4 * PAGE)
    leave_cached(memory, 4, name=1)
    assert not memory.reserve_pass(5 * BYTES)
    long = sequence([1] * 90, 4)
    memory.begin(long)
    assert not memory.grow(long, 5 * PAGE)
    assert memory.pages.num_cached == 4 and not long.pages


def test_pages_in_use_move_below_the_new_end() -> None:
    memory = memory_of(10)
    low, _high = begin(memory, 4 * PAGE), begin(memory, 2 * PAGE, 1)
    memory.take_plan()
    memory.release(low)
    assert memory.reserve_pass(7 * BYTES)
    plan = memory.take_plan()
    assert plan.num_pages == 3
    assert plan.moved_pages == (CopyPage(4, 0, PAGE), CopyPage(5, 1, PAGE))
    assert plan.tables == (Table(1, 0, (0, 1)),)
    assert not memory.take_plan().tables


def test_pages_of_an_open_pass_keep_their_numbers() -> None:
    memory = memory_of(10)
    low, high = begin(memory, 4 * PAGE), begin(memory, 2 * PAGE, 1)
    memory.fix(high)
    memory.take_plan()
    memory.release(low)
    assert not memory.reserve_pass(5 * BYTES)
    assert memory.reserve_pass(4 * BYTES)
    assert not memory.take_plan().moved_pages
    memory.unfix(high)
    memory.take_plan()
    assert memory.reserve_pass(3 * BYTES) and len(memory.take_plan().moved_pages) == 2


def test_a_page_that_is_copied_stays_until_the_plan_is_built() -> None:
    memory = memory_of(4)
    seq = begin(memory, PAGE, 1)
    source = seq.pages[0]
    memory.pages.name(source, 8, b"half")
    memory.release(seq)
    copied = memory.copy_of(source, 8)
    assert copied is not None and copied.names == {8: b"half"}
    assert not memory.reserve_pass(3 * BYTES), "neither of the two pages can go"
    assert memory.reserve_pass(2 * BYTES) and source.number != copied.number
    assert memory.take_plan().copies == (CopyPage(source.number, copied.number, 8),)
    assert memory.reserve_pass(BYTES), "now the source can"


def test_the_content_of_a_failed_chunk_is_not_stored_though_its_page_is_gone() -> None:
    """With look-ahead the next plan may evict and export it before the failure is known."""
    memory = memory_of(2, store_enabled=True)
    seq, step = begin(memory, PAGE, 1), InFlightStep(0)
    memory.pages.name(seq.pages[0], PAGE, b"bad")
    content = seq.pages[0].content
    assert content is not None
    step.named[seq], step.filled[seq] = [b"bad"], [content]
    memory.release(seq)
    assert memory.reserve_pass(2 * BYTES)
    (export,) = memory.take_plan().exports_first
    discard_failed({seq}, step, None, memory)
    assert memory.backlog.take_exported(export.block_id, (b"",)) is None


def test_the_least_recently_used_of_pages_and_snapshots_is_evicted() -> None:
    memory = memory_of(4, state_bytes=BYTES, max_snapshots=9)
    snapshot = memory.add_snapshot(b"a" * 16)
    assert snapshot is not None
    memory.snapshots.unpin(snapshot)
    leave_cached(memory, 2, name=1)
    assert memory.reserve_pass(2 * BYTES)
    assert not len(memory.snapshots) and memory.pages.num_cached == 2
    assert memory.take_plan().evictions == (snapshot.id,)


@pytest.mark.parametrize(
    ("rows", "pads", "taken"), [(1, False, 4), (2, False, 6), (9, False, 7), (9, True, 12)]
)
def test_the_temporary_arrays_of_as_many_rows_as_are_gathered_at_once_are_in_the_ledger(
    rows: int, pads: bool, taken: int
) -> None:
    memory = memory_of(30, gather_token_bytes=BYTES // PAGE, gather_rows=rows, pads_gathers=pads)
    assert memory.capacity == 15 * PAGE
    seq = begin(memory, 4 * PAGE)
    assert memory.gather_bytes == 4 * BYTES
    others = [begin(memory, pages * PAGE, pages) for pages in (1, 2)]
    assert memory.gather_bytes == taken * BYTES
    memory.release(seq)
    memory.update_gathers()
    assert memory.gather_bytes == {1: 2, 2: 3, 9: 4 if pads else 3}[rows] * BYTES
    assert memory.grow(others[0], 2 * PAGE)
    assert memory.gather_bytes == (2 if rows == 1 else 4) * BYTES


@pytest.mark.parametrize("rows", [1, 2, 9])
@pytest.mark.parametrize("pads", [False, True])
@pytest.mark.parametrize("tokens", [2 * PAGE, 10 * PAGE])
def test_as_many_sequences_fit_at_once_as_the_configuration_says(
    rows: int, pads: bool, tokens: int
) -> None:
    memory = memory_of(
        60,
        gather_token_bytes=BYTES // PAGE // 2,
        gather_rows=rows,
        pads_gathers=pads,
        completion_batch_size=60,
    )
    wanted = memory._config.at_once(tokens)
    for number in range(wanted):
        begin(memory, tokens, number)
    assert memory._config.longest_of(wanted) >= tokens > memory._config.longest_of(wanted + 1)
    last = sequence([wanted, *range(tokens - 1)], 4)
    last.slot = memory.take_slot()
    memory.begin(last)
    assert not memory.grow(last, tokens)


def test_rows_are_unpacked_while_there_is_room_and_dropped_before_a_sequence() -> None:
    memory = memory_of(40, unpacked_token_bytes=BYTES // PAGE)
    seq = begin(memory, 4 * PAGE)
    seq.max_tokens = 37  # so that it has at most 100 positions
    memory.unpack(seq, 4 * PAGE)
    assert memory.take_plan().unpacked == (Unpack(0, 100),), "with room to grow"
    memory.unpack(seq, 5 * PAGE)
    assert not memory.take_plan().unpacked
    other = begin(memory, 8 * PAGE, 1)
    memory.unpack(other, 8 * PAGE)
    assert not memory.take_plan().unpacked, "at most a quarter of the memory"
    assert memory.grow(other, 29 * PAGE)
    assert memory.take_plan().unpacked == ()
    assert memory.grow(other, 30 * PAGE)
    assert memory.take_plan().unpacked == (Unpack(0, 0),)
    assert memory.ledger.used_bytes == memory.pages.num_pages * BYTES


def test_after_running_out_of_memory_the_longest_sequence_is_shorter() -> None:
    memory = memory_of(100)
    begin(memory, 100 * PAGE)
    memory.ran_out()
    memory.clear()
    assert memory.capacity == 90 * PAGE
    begin(memory, 90 * PAGE)
