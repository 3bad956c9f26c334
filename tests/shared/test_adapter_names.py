"""Decisions about names of adapters, merged by several processes."""

from __future__ import annotations

import random

from shared.adapter_names import MAX_DECISIONS, DecisionTable
from shared.wire import AdapterDecision, AdapterRef


def ref(name: str, digest: str) -> AdapterRef:
    return AdapterRef(name=name, path=f"/{digest}", digest=digest)


def test_tables_agree_in_whatever_order_they_hear_of_decisions() -> None:
    chance = random.Random(0)
    tables = [DecisionTable() for _ in range(3)]
    for _ in range(60):
        name, table = chance.choice("abc"), chance.choice(tables)
        adapter = ref(name, str(chance.randrange(9))) if chance.random() < 0.7 else None
        table.merge([table.next(name, adapter)])
        chance.choice(tables).merge(chance.sample(table.all, len(table.all)))
    for _ in range(2):
        for one in tables:
            for other in tables:
                one.merge(other.all)
    first, *others = [{each.name: each for each in table.all} for table in tables]
    assert others == [first, first]


def test_the_last_decision_holds_and_an_older_one_changes_nothing() -> None:
    table = DecisionTable()
    loaded = table.next("a", ref("a", "1"))
    assert table.merge([loaded])
    assert table.merge([table.next("a", None)])
    assert not table.merge([loaded])
    assert [each.adapter for each in table.all] == [None]


def test_a_decision_that_no_peer_can_have_made_is_left_out_and_stops_no_later_one() -> None:
    table = DecisionTable()
    long = AdapterRef(name="b", path="/" * 5000, digest="1")
    wrong = [
        AdapterDecision(name="a", adapter=ref("a", "1"), version=2**53 - 1),
        AdapterDecision(name="b", adapter=long, version=1),
        AdapterDecision(name="c", adapter=ref("d", "1"), version=1),
    ]
    assert not table.merge(wrong)
    soon = table.next("a", None).version + 3600 * 1_000_000  # a peer's clock is ahead
    assert table.merge([AdapterDecision(name="a", adapter=ref("a", "1"), version=soon)])
    assert table.merge([table.next("a", None)])
    assert [each.adapter for each in table.all] == [None]


def test_removals_beyond_the_most_are_forgotten_first() -> None:
    table = DecisionTable()
    table.merge([AdapterDecision(name="kept", adapter=ref("kept", "1"), version=1)])
    table.merge(AdapterDecision(name=f"n{i}", version=i + 2) for i in range(MAX_DECISIONS + 5))
    assert len(table.all) == MAX_DECISIONS
    assert "kept" in table and "n0" not in table
