"""The choice of the texts of a pass."""

from __future__ import annotations

from collections import Counter

from engine.embedding.texts import Text, TextQueue
from shared.wire import Encode

ROW = b"\0\0\0\0"


def encode(name: str, *lengths: int, group: str = "", priority: int = 0) -> Encode:
    """A job whose texts differ from those of other jobs."""
    first = sum(map(ord, name))
    texts = [[first + number] * length for number, length in enumerate(lengths)]
    return Encode(
        request_id=name, attempt=0, token_ids=texts, group=group or name, priority=priority
    )


def taken(queue: TextQueue, budget: int = 100, small: int = 10, **options: object) -> list[str]:
    return sorted(queue.take(budget, small, **options).values())  # type: ignore[arg-type]


def test_a_pass_has_texts_up_to_its_budget_and_one_that_is_longer_alone() -> None:
    queue = TextQueue()
    queue.add(encode("a", 30, 30, 30, 30, 500))
    assert taken(queue) == ["a"] * 3
    assert taken(queue) == ["a"]
    assert taken(queue) == ["a"]
    assert taken(queue) == []


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


def test_texts_of_others_at_most_double_a_pass() -> None:
    queue = TextQueue()
    for name in ("ant", "bee", "cat"):
        queue.add(encode(name, 40))
    assert taken(queue) == ["ant", "bee"]
    assert taken(queue) == ["cat"]


def test_small_texts_of_several_groups_share_a_pass() -> None:
    queue = TextQueue()
    for name in ("ant", "bee", "cat", "dog"):
        queue.add(encode(name, 4))
    assert taken(queue) == ["ant", "bee"]
    assert taken(queue) == ["cat", "dog"]


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
    queue.add(encode("high", 5, priority=3))
    assert taken(queue) == ["high"]
    assert taken(queue) == ["low"]


def test_equal_texts_are_computed_once_also_while_one_is_computed() -> None:
    queue = TextQueue()
    first, second = encode("same", 3, 4), encode("same", 3, 4)
    queue.add(first)
    texts = queue.take(100, 10)
    second = Encode(request_id="other", attempt=0, token_ids=second.token_ids, group="other")
    queue.add(second)
    assert queue.take(100, 10) == {}
    done = [job.message.request_id for text in texts for job in queue.done(text, ROW)]
    assert sorted(done) == ["other", "same"]
    assert (queue.num_texts, queue.num_shared, len(queue)) == (4, 2, 0)


def test_rows_are_in_the_order_of_the_texts() -> None:
    queue = TextQueue()
    queue.add(Encode(request_id="a", attempt=0, token_ids=[[1], [2], [1]]))
    texts = list(queue.take(100, 10))
    rows = {Text((1,)): b"1", Text((2,)): b"2"}
    (job,) = [job for text in reversed(texts) for job in queue.done(text, rows[text])]
    assert job.rows == [b"1", b"2", b"1"]


def test_a_dropped_job_leaves_what_others_want() -> None:
    queue = TextQueue()
    queue.add(Encode(request_id="a", attempt=0, token_ids=[[1], [2]], group="a"))
    queue.add(Encode(request_id="b", attempt=0, token_ids=[[2], [3]], group="b"))
    queue.drop(("a", 0))
    assert {text.token_ids for text in queue.take(100, 10)} == {(2,), (3,)}
    queue.drop(("b", 0))
    queue.drop(("b", 0))
    assert queue.num_waiting == 0
    assert queue.done(Text((2,)), ROW) == []


def test_a_text_that_fails_gives_up_all_who_want_it_and_nobody_else() -> None:
    queue = TextQueue()
    queue.add(Encode(request_id="a", attempt=0, token_ids=[[1], [2]], group="a"))
    queue.add(Encode(request_id="b", attempt=0, token_ids=[[1]], group="b"))
    queue.add(Encode(request_id="c", attempt=0, token_ids=[[2]], group="c"))
    queue.take(100, 10)
    assert [job.message.request_id for job in queue.fail(Text((1,)))] == ["a", "b"]
    assert [job.message.request_id for job in queue.done(Text((2,)), ROW)] == ["c"]
