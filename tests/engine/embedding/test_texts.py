"""The choice of the texts of a pass."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from engine.embedding.texts import TextQueue
from engine.model.encoder import Text
from shared.wire import Encode

ROW = b"\0\0\0\0"


def job(name: str, *texts: list[int], group: str = "", priority: int = 0) -> Encode:
    group = group or name
    return Encode(request_id=name, attempt=0, token_ids=[*texts], group=group, priority=priority)


def encode(name: str, *lengths: int, **fields: Any) -> Encode:
    """A job whose texts differ from those of other jobs."""
    first = sum(map(ord, name))
    return job(name, *([first + n] * length for n, length in enumerate(lengths)), **fields)


def taken(queue: TextQueue, budget: int = 100, small: int = 10, **options: object) -> list[str]:
    return sorted(queue.take(budget, small, **options).values())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("jobs", "passes"),
    [
        ({"a": [30, 30, 30, 30, 500]}, [["a"] * 3, ["a"], ["a"], []]),
        ({"ant": [40], "bee": [40], "cat": [40]}, [["ant", "bee"], ["cat"]]),
        ({name: [3] for name in ("ant", "bee", "cat", "dog")}, [["ant", "bee", "cat"], ["dog"]]),
    ],
    ids=["its budget, or a longer text alone", "others at most double it", "small texts share it"],
)
def test_texts_of_a_pass(jobs: dict[str, list[int]], passes: list[list[str]]) -> None:
    queue = TextQueue()
    for name, lengths in jobs.items():
        queue.add(encode(name, *lengths))
    assert [taken(queue) for _ in passes] == passes


def test_a_group_that_has_not_been_served_goes_first_and_alone() -> None:
    queue = TextQueue()
    queue.add(encode("many", *[20] * 50))
    assert taken(queue) == ["many"] * 5
    queue.add(encode("one", 15))
    assert taken(queue) == ["one"]
    assert taken(queue) == ["many"] * 5


def test_no_group_starves_another_with_texts_that_come_all_the_time() -> None:
    queue = TextQueue()
    queue.add(encode("many", *[20] * 50))
    served: Counter[str] = Counter()
    for number in range(6):
        queue.add(encode(f"single {number}", 20, group="singles"))
        served.update(taken(queue))
    assert served["many"] >= served["singles"] >= 5


def test_between_layers_only_other_groups_are_served() -> None:
    queue = TextQueue()
    queue.add(encode("many", *[20] * 9))
    assert taken(queue) == ["many"] * 5
    assert taken(queue, but_of=["many"]) == []
    queue.add(encode("later", 5, priority=-1))
    assert taken(queue, but_of=["many"], at_least=0) == []
    queue.add(encode("one", 5))
    assert taken(queue, but_of=["many"], at_least=0) == ["one"]


def test_a_higher_priority_goes_first() -> None:
    queue = TextQueue()
    queue.add(encode("low", 5, priority=-1))
    queue.add(encode("later", 5, group="high", priority=-1))
    queue.add(encode("high", 30, 30, priority=3))
    assert taken(queue) == ["high", "high"]
    assert taken(queue) == ["high", "low"]


def test_equal_texts_are_computed_once_also_while_one_is_computed() -> None:
    queue = TextQueue()
    queue.add(job("same", [1], [2]))
    texts = queue.take(100, 10)
    queue.add(job("other", [1], [2]))
    assert queue.take(100, 10) == {}
    done = [one.message.request_id for text in texts for one in queue.done(text, ROW)]
    assert sorted(done) == ["other", "same"]
    assert (queue.num_texts, queue.num_shared, len(queue)) == (4, 2, 0)


def test_rows_are_in_the_order_of_the_texts() -> None:
    queue = TextQueue()
    queue.add(job("a", [1], [2], [1]))
    texts = list(queue.take(100, 10))
    rows = {Text((1,)): b"1", Text((2,)): b"2"}
    (done,) = [one for text in reversed(texts) for one in queue.done(text, rows[text])]
    assert done.rows == [b"1", b"2", b"1"]


def test_a_dropped_job_leaves_what_others_want() -> None:
    queue = TextQueue()
    queue.add(job("a", [1], [2]))
    queue.add(job("b", [2], [3]))
    queue.drop(("a", 0))
    assert {text.token_ids for text in queue.take(100, 10)} == {(2,), (3,)}
    queue.drop(("b", 0))
    queue.drop(("b", 0))
    assert queue.num_waiting == 0
    assert queue.done(Text((2,)), ROW) == []


def test_a_text_that_fails_gives_up_all_who_want_it_and_nobody_else() -> None:
    queue = TextQueue()
    for message in (job("a", [1], [2]), job("b", [1]), job("c", [2])):
        queue.add(message)
    queue.take(100, 10)
    assert [one.message.request_id for one in queue.fail(Text((1,)))] == ["a", "b"]
    assert [one.message.request_id for one in queue.jobs] == ["c"]
    assert [one.message.request_id for one in queue.done(Text((2,)), ROW)] == ["c"]
