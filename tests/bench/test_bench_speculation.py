"""The comparisons of drafts, on a tiny model; those on the demo model are slow."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.speculation.drafts import MISSES, NOTHING, compare
from bench.speculation.every_kind import measure, show
from bench.speculation.kinds_of_text import KINDS
from bench.speculation.lossless import check


def test_answers_with_drafts_are_compared_for_each_feature(
    tiny_model: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    cases, model = ["greedy", "penalties", "together"], str(tiny_model("llama"))
    assert not check(model, cases, 9, 12, draft_model=model)
    shown = capsys.readouterr().out
    assert shown.count("9/9 the same") == 4 * len(cases)
    assert re.search(r"greedy +draft +9/9 the same  \(draft [1-9]", shown)  # some are accepted


@pytest.mark.slow
def test_answers_of_the_demo_model_are_the_same_with_drafts() -> None:
    assert check("demo-fp32", ["together"], prompts=4, tokens=12) == 0


def test_the_same_requests_are_timed_with_drafts_and_without(
    tiny_model: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    compare(str(tiny_model("llama")), 1, ["code edit", "JSON", MISSES, NOTHING], [1, 2], 48)
    shown = capsys.readouterr().out
    lines = [line for line in shown.splitlines() if line.endswith((" 1/1", " 2/2"))]
    assert len(lines) == 8  # all texts are the same
    wrong = [line for line in lines if line.startswith(MISSES)]
    assert all(line.split()[-2].startswith("0/") for line in wrong)  # none was accepted
    silent = [line for line in lines if line.startswith(NOTHING)]
    assert [line.split()[-2] for line in silent] == ["0/0", "0/0"]
    assert "us a token" in shown


def test_prompts_of_every_kind_are_timed_and_remembered(
    tiny_model: Callable[..., Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model, record = str(tiny_model("llama")), tmp_path / "lines"
    assert len(KINDS) == 20
    assert [pair.prompt for pair in measure(model, ["CSV"], [1], 1, record, prompts=[2])] == [2]
    pairs = measure(model, ["CSV"], [1], 3, record)
    assert len(pairs) == 9 and all(pair.same and pair.ratio > 0 for pair in pairs)
    # Where others use the machine, drafts of a tiny model may not seem worth it for a while.
    assert any(pair.drafted >= pair.accepted > 0 for pair in pairs)
    assert measure("no such model", ["CSV"], [1], 3, record) == pairs
    show(pairs)
    shown = capsys.readouterr().out
    assert "of 3 prompts" in shown and "9 of 9 pairs are the same" in shown
