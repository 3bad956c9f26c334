"""The comparisons of drafts, on a tiny model; those on the demo model are slow."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.speculation.drafts import MISSES, compare
from bench.speculation.every_kind import measure, show
from bench.speculation.kinds_of_text import KINDS
from bench.speculation.lossless import check
from bench.speculation.ngram_rules import (
    LlamaLookupRule,
    LlamaModRule,
    LlamaSimpleRule,
    OurRule,
    SuffixCounts,
    SuffixRule,
    VllmRule,
    replay,
)
from bench.speculation.shared_steps import replay_together

LIST = list(range(30, 60))


def test_answers_with_drafts_are_compared_for_each_feature(
    tiny_model: Callable[..., Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    cases, model, record = ["greedy", "penalties", "together"], str(tiny_model("llama")), tmp_path

    def checked(model: str, cases: list[str], **options: Any) -> str:
        assert not check(model, cases, 9, 12, record / "lines", draft_model=model, **options)
        return capsys.readouterr().out

    assert checked(model, cases[:1], seconds=0).count("0/0 the same") == 4
    shown = checked(model, cases)
    assert shown.count("9/9 the same") == 4 * len(cases)
    assert re.search(r"greedy +draft +9/9 the same  \(draft [1-9]", shown)  # some are accepted
    assert checked("no such model", cases) == shown  # it is all there


@pytest.mark.slow
def test_answers_of_the_demo_model_are_the_same_with_drafts() -> None:
    assert check("demo-fp32", ["together"], prompts=8, tokens=16) == 0


def test_the_same_requests_are_timed_with_drafts_and_without(
    tiny_model: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    compare(str(tiny_model("llama")), 1, ["code edit", "JSON", MISSES], [1, 2], 16)
    shown = capsys.readouterr().out
    lines = [line for line in shown.splitlines() if line.endswith((" 1/1", " 2/2"))]
    assert len(lines) == 6  # all texts are the same
    wrong = [line for line in lines if line.startswith(MISSES)]
    assert all(line.split()[-2].startswith("0/") for line in wrong)  # none was accepted
    assert "vLLM" in shown and "us a token" in shown


def test_rules_of_other_servers_draft_as_they_say() -> None:
    again = [*LIST, 7, 8]
    first = VllmRule(1, 4, 3)
    assert list(first.propose([*again, 30, 31])) == [32, 33, 34]
    assert list(first.propose([1, 2, 1, 3, 1])) == [2, 1, 3]  # of several places the first
    assert list(first.propose([1, 2, 3])) == []
    lookup = LlamaLookupRule()
    assert list(lookup.propose([1, 2, 3, 1, 2]))[:1] == []  # seen once only, after two tokens
    assert list(lookup.propose([1, 2, 3, 1, 2, 3, 1, 2]))[:2] == [3, 1]
    simple = LlamaSimpleRule()
    assert list(simple.propose([*LIST, *again, *LIST[:12]])) == [*LIST[12:], 7, 8][:16]
    assert list(simple.propose([*LIST, *again, *LIST[:11]])) == []
    followed: dict[tuple[int, ...], int] = {}
    LlamaModRule(followed).propose(LIST)
    assert list(LlamaModRule(followed).propose(LIST[:20])) == LIST[20:]  # of another request
    suffix = SuffixRule(None)
    assert list(suffix.propose([1, 2, 3, 9, 2, 3])) == [9, 2]  # no more than have matched
    assert list(suffix.propose([1, 2, 3, 9, 2, 3, 8, 3, 8, 3])) == [8, 3]
    earlier = SuffixCounts()
    earlier.enter(LIST, 0)
    assert list(SuffixRule(earlier).propose(LIST[:3])) == LIST[3:6]


def test_a_replay_counts_steps_and_drafts() -> None:
    prompt, answer = [*LIST, 7], [*LIST[:10], 8, 9]
    steps, drafted, accepted = replay(VllmRule(1, 4, 3), prompt, answer)
    assert steps + accepted == len(answer) - 1
    assert 6 <= accepted < drafted
    assert replay(OurRule(OurRule.speculator(3), prompt, answer), prompt, answer)[2] >= accepted


def test_prompts_of_every_kind_are_timed_and_remembered(
    tiny_model: Callable[..., Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model, record = str(tiny_model("llama")), tmp_path / "lines"
    assert len(KINDS) == 20
    pairs = measure(model, ["CSV"], [1], 1, record)
    assert len(pairs) == 3 and all(pair.same and pair.ratio > 0 for pair in pairs)
    assert measure("no such model", ["CSV"], [1], 1, record) == pairs
    show(pairs)
    shown = capsys.readouterr().out
    assert "of 3 prompts" in shown and "3 of 3 pairs are the same" in shown


def test_requests_that_share_steps_are_replayed() -> None:
    repeats = ([*LIST, 7], [*LIST, *LIST])
    other = ([1, 2, 3], list(range(100, 160)))
    mean, least = replay_together([repeats, repeats], 0.02, protects=True)
    assert mean > 1.5 and least > 1.5
    mean, least = replay_together([repeats, repeats, other], 0.2, protects=True)
    assert least > 0.9
