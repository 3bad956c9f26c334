"""What steps with drafts cost is known to the next engine of the same model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from engine.backend import gpu_path
from engine.executor.batched import BatchedExecutor
from engine.executor.steps import BatchedStep
from engine.plan import Plan
from engine.replica.kept_costs import KeptCosts
from engine.speculation.batch_costs import PLAIN_FIRST, BatchCosts
from tests.engine.conftest import Wrap
from tests.engine.whole import Whole


def learned(rows: int = 1, plain_s: float = 0.03) -> BatchCosts:
    costs = BatchCosts()
    for drafted in (*[0] * PLAIN_FIRST, 1, 2, 4, 8, 16):
        for _ in range(5):
            costs.observe(rows, drafted, plain_s * (1 + 0.05 * drafted))
    return costs


def test_costs_are_known_after_a_restart(tmp_path: Path) -> None:
    path, costs = tmp_path / "costs" / "a.json", learned(rows=4)
    kept = KeptCosts(path, costs)
    kept.keep()  # it has just begun
    assert not path.exists()
    costs.observe(4, 0, 0.03)
    kept.keep(at_once=True)
    again = BatchCosts()
    KeptCosts(path, again)
    assert not again.needs_plain(4) and again.needs_plain(5)
    assert again.plain_s(4) == pytest.approx(0.03)
    assert again.predict_s(4, 8) == pytest.approx(costs.predict_s(4, 8), rel=0.1)
    again.observe(4, 0, 0.04)  # what was remembered soon counts little
    for _ in range(30):
        again.observe(4, 0, 0.04)
    assert again.plain_s(4) > 0.036


def test_a_file_without_steps_that_drafted_nothing_leaves_them_to_be_measured() -> None:
    """One that drafts in every step, whatever it costs, never measured any."""
    costs = BatchCosts()
    costs.remember({2: {4: 0.05}})
    assert costs.needs_plain(2)
    for _ in range(PLAIN_FIRST):
        costs.observe(2, 0, 0.03)
    assert not costs.needs_plain(2) and costs.plain_s(2) == pytest.approx(0.03)


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"no", b"[]", b"\xff" * 100, b'{"1": {"0": -1}}', b'{"1": {"0": 1e9}}'),
        *(b'{"0": {"0": 1}}', b'{"1": {"99999999": 1}}', b'{"1": {"-1": 0.1}}'),
    ],
)
def test_a_damaged_file_is_ignored(tmp_path: Path, body: bytes) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(body)
    costs = BatchCosts()
    KeptCosts(path, costs)
    assert not costs.known()


def test_a_folder_that_cannot_be_written_costs_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "costs").write_bytes(b"not a folder")
    costs = BatchCosts()
    kept = KeptCosts(tmp_path / "costs" / "a.json", costs)
    costs.observe(1, 0, 0.03)
    kept.keep(at_once=True)
    assert "cannot store the costs" in caplog.text


def kept_by(whole: Whole) -> KeptCosts:
    kept = whole.replica.kept_costs
    assert kept is not None
    return kept


def test_a_replica_begins_with_what_the_one_before_has_learned(llama: Path, tmp_path: Path) -> None:
    proofs = tmp_path / "proofs"
    first = kept_by(Whole(llama, spec_decode="auto", proofs=proofs))
    for _ in range(PLAIN_FIRST):
        first._costs.observe(3, 0, 0.02)
    first.keep(at_once=True)
    second = kept_by(Whole(llama, spec_decode="auto", proofs=proofs))
    assert second._costs.plain_s(3) == pytest.approx(0.02)
    assert Whole(llama, spec_decode="none", proofs=proofs).replica.kept_costs is None


def on_a_gpu(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(mx, "default_device", lambda: mx.gpu)  # as in forced_gpu_path, but compiled
    patch.setattr(gpu_path, "forced", True)


def test_a_device_is_asked_at_the_start_what_drafts_cost(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrap: Wrap
) -> None:
    """If a plan were dispatched before the rest of the one before it, a step would be measured as
    the time of its first layer, and no draft would ever be worth while."""
    on_a_gpu(monkeypatch)
    monkeypatch.setattr("engine.replica.rehearsal.LONGEST_S", 60.0)  # other tests run beside it
    proofs = tmp_path / "proofs"
    steps: list[BatchedStep] = []

    @wrap(BatchedExecutor, "dispatch")
    def dispatched(dispatch: Any, executor: Any, plan: Plan) -> BatchedStep:
        assert not any(step.unsent for step in steps)
        steps.append(dispatch(executor, plan))
        return steps[-1]

    whole = Whole(llama, spec_decode="auto", proofs=proofs)
    kept = kept_by(whole)
    assert whole.executor.spec.look_ahead
    assert not kept._costs.needs_plain(1)
    drafts = [sum(len(decode.drafts) for decode in step.plan.decodes) for step in steps]
    assert {0, 2, 4, 8} <= {*drafts} and {0, 2, 4, 8} <= kept._costs.known()[1].keys()
    kept.keep(at_once=True)
    monkeypatch.undo()
    on_a_gpu(monkeypatch)
    again = Whole(llama, spec_decode="auto", proofs=proofs)  # which only reads them
    assert kept_by(again)._costs.changes == 0
    text = again.serve("a", [5, 6, 7] * 9)
    assert len(text) == 20 and whole.serve("a", [5, 6, 7] * 9) == text


def test_a_rehearsal_that_fails_costs_nothing_else(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    on_a_gpu(monkeypatch)

    def fails(*args: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(BatchedExecutor, "dispatch", fails)
    whole = Whole(llama, spec_decode="auto", proofs=tmp_path / "proofs")
    assert "no memory" in caplog.text
    monkeypatch.undo()
    on_a_gpu(monkeypatch)
    assert len(whole.serve("a", [5, 6, 7], 5)) == 5
