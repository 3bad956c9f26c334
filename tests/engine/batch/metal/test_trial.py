"""The trial of kernels on a device, and what is remembered of it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest

from engine import device
from engine.batch.gpu import GPUBatch
from engine.batch.metal import calls, kernel, records, trial
from engine.batch.metal.calls import Variant
from engine.batch.metal.trial import (
    AttentionShape,
    KernelChoice,
    KernelTrial,
    TimedAttention,
    Timing,
)
from engine.cache.layout import probe_layout
from engine.cache.quantization import UNQUANTIZED, Precision
from tests.engine.batch.metal.test_kernels import form_of

FAST, SLOW = Variant(4, 8, 4), Variant(2, 4, 1)
FORM = form_of(1, 64, 64)
WAY = KernelChoice(True, True, (Timing(AttentionShape(256, 1, 1), 2.0, 1.0, FAST),))


@pytest.fixture(autouse=True)
def unremembered() -> Iterator[None]:
    yield
    records.keep_in(None)


def test_the_nearest_measured_case_decides() -> None:
    way = KernelChoice(
        timings=(
            Timing(AttentionShape(256, 1, 1), 1.0, 1.5, SLOW),
            Timing(AttentionShape(2048, 1, 1), 2.0, 1.5, FAST),
            Timing(AttentionShape(16_384, 1, 1), 9.0, 2.0, SLOW),
            Timing(AttentionShape(2048, 8, 1), 2.0, 2.5, FAST),
            Timing(AttentionShape(2048, 1, 16), 2.0, 2.0, SLOW),
        )
    )
    assert way.attends
    assert way.variant(100, 1, 1) is None
    assert way.variant(3_000, 2, 1) == FAST
    assert way.variant(100_000, 1, 1) == SLOW
    assert way.variant(2_048, 30, 2) is None
    assert way.variant(2_048, 1, 12) == SLOW
    assert way.variant(2_048, 1, 17) is None
    assert KernelChoice().variant(100, 1, 1) is None and not KernelChoice().attends


def test_the_fastest_of_the_right_variants_is_kept_where_gathering_is_slower(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trial, "TIMED_TOKENS", (64, 128))
    tried = KernelTrial(FORM, 4)
    wrong, fast, *_ = calls.variants_of(FORM, 4, 1)
    times = {wrong: 0.1, fast: 0.5}
    monkeypatch.setattr(KernelTrial, "rounds_right", lambda self: True)
    monkeypatch.setattr(KernelTrial, "gathers_right", lambda self: False)
    monkeypatch.setattr(KernelTrial, "attends_right", lambda self, variant, _: variant != wrong)
    monkeypatch.setattr(TimedAttention, "kernel_s", lambda self, variant: times.get(variant, 1.0))
    monkeypatch.setattr(
        TimedAttention, "gathering_s", lambda self, _: 0.3 if self.point.rows == 8 else 0.7
    )
    way = tried.run()
    assert way.rounds and not way.gathers and len(way.timings) == 2 * 2 * 3
    for timing in way.timings:
        if timing.point.queries == 1:
            assert timing.variant == fast
    assert way.variant(64, 1, 1) == fast and way.variant(64, 8, 1) is None
    monkeypatch.setattr(KernelTrial, "attends_right", lambda self, variant, _: variant != fast)
    assert tried.checked(way).variant(64, 1, 1) is None


def test_timing_runs_what_passes_run(
    emulated: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "TRIES", 1)
    tried = KernelTrial(form_of(2, 64, 64), 8)
    pool = mx.zeros((4 * tried.form.page_words,), mx.uint32)
    case = TimedAttention(tried, pool, AttentionShape(40, 2, 1))
    assert case.kernel_s(FAST) > 0 and case.values_s() > 0
    assert case.gathering_s(by_kernel=False) > 0
    assert emulated["paged_attend"].calls > 1 and "paged_gather" not in emulated
    assert case.gathering_s(by_kernel=True) > 0
    assert emulated["paged_gather"].calls > 1


def test_a_kernel_that_cannot_be_compiled_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(**named: object) -> list[mx.array]:
        raise RuntimeError("[metal::Device] Unable to build metal library from source")

    monkeypatch.setattr(kernel, "make", lambda source: refused)
    monkeypatch.setattr(trial, "CHECKED_TOKENS", (1, 17))
    calls._kernel.cache_clear()
    assert KernelTrial(FORM, 4).run() == KernelChoice()
    calls._kernel.cache_clear()
    assert "cannot run: [metal::Device] Unable to build" in caplog.text


def count_trials(monkeypatch: pytest.MonkeyPatch, found: KernelChoice = WAY) -> list[int]:
    """Make trials find ``found``, and return a list that grows with each."""
    runs: list[int] = []

    def run(self: KernelTrial) -> KernelChoice:
        runs.append(1)
        return found

    monkeypatch.setattr(kernel, "why_not", lambda: "")
    monkeypatch.setattr(KernelTrial, "run", run)
    monkeypatch.setattr(KernelTrial, "checked", lambda self, way: way)
    return runs


def test_a_trial_is_remembered_for_the_same_kind_of_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, folder = count_trials(monkeypatch), tmp_path / "kernels"
    for again in (False, False, True):
        records.keep_in(folder, repeats=again)
        assert records.way_of(FORM, 4) == records.way_of(FORM, 4) == WAY
    assert len(runs) == 2  # the first and the one that repeats it
    records.way_of(FORM, 8)
    records.way_of(form_of(1, 64, 64, bits=16), 4)
    assert len(runs) == 4
    assert {path.suffix for path in folder.iterdir()} == {".json"}
    assert records.summary(folder) == "3 kinds of layers tried, 3 of them attend by kernels"
    for path in folder.iterdir():
        path.write_bytes(b"{")
    records.keep_in(folder)
    assert records.way_of(FORM, 4) == WAY and len(runs) == 5


_KILLED = """
import os, sys
from pathlib import Path
from engine.batch.metal import kernel, records
from engine.batch.metal.trial import KernelTrial
from tests.engine.batch.metal.test_kernels import form_of
kernel.why_not = lambda: ""
KernelTrial.run = lambda self: os._exit(3)
records.keep_in(Path(sys.argv[1]))
records.way_of(form_of(1, 64, 64), 4)
"""


def test_a_trial_that_ends_the_process_is_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ended = subprocess.run([sys.executable, "-c", _KILLED, str(tmp_path)], timeout=200)
    assert ended.returncode == 3
    runs = count_trials(monkeypatch)
    records.keep_in(tmp_path)
    assert not records.way_of(FORM, 4).attends and not runs
    assert "did not end" in caplog.text and "1 trials did not end" in records.summary(tmp_path)
    assert records.way_of(FORM, 8) == WAY, "others are tried"
    records.keep_in(tmp_path, repeats=True)
    assert records.way_of(FORM, 4) == WAY
    records.keep_in(tmp_path)
    assert records.way_of(FORM, 4) == WAY, "and no mark is left"


def test_a_trial_of_another_engine_that_still_runs_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = count_trials(monkeypatch)
    records.keep_in(tmp_path)
    digest = records._digest(FORM, 4)
    (tmp_path / f"{digest}.{os.getppid()}{records.MARK}").touch()
    assert records.way_of(FORM, 4) == WAY and runs


def test_an_error_leaves_no_mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: KernelTrial) -> KernelChoice:
        raise KeyboardInterrupt

    count_trials(monkeypatch)
    monkeypatch.setattr(KernelTrial, "run", interrupted)
    records.keep_in(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        records.way_of(FORM, 4)
    assert not [*tmp_path.iterdir()]


def test_kernels_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = count_trials(monkeypatch)
    monkeypatch.undo()
    monkeypatch.setenv(kernel.VARIABLE, "0")
    assert not records.way_of(FORM, 4).attends and not runs
    assert kernel.why_not() == "MLX_LM_SERVER_KERNELS is 0"


@pytest.mark.parametrize(
    ("found", "name"),
    [(WAY, "kernels"), (KernelChoice(), "gathering"), (KernelChoice(reason="x"), "gathering (x)")],
)
def test_a_batch_class_has_the_kernels_of_a_models_layers_and_names_the_way(
    llama: Path, monkeypatch: pytest.MonkeyPatch, found: KernelChoice, name: str
) -> None:
    device.prepare()
    runs = count_trials(monkeypatch, found)
    model = mlx_lm.load(str(llama))[0]
    layout = probe_layout(model)
    records.keep_in(None)
    batch_class = GPUBatch.tried(model, layout, Precision(8), 64)
    assert batch_class.attends_by == name and len(runs) == 2  # in 16 bits, for the proof, and in 8
    for precision in (UNQUANTIZED, Precision(8)):
        keys, values = layout.with_precision(precision).arrays[:2]
        assert batch_class.kernels[keys, values].way == found
        assert batch_class.kernels[keys, values].query_heads == 4
    monkeypatch.setattr(kernel, "why_not", lambda: "no GPU")
    assert GPUBatch.tried(model, layout, Precision(8), 64).attends_by == "gathering (no GPU)"


def test_a_model_that_attends_by_itself_has_no_kernels(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = count_trials(monkeypatch)

    class Model:
        def __call__(self, inputs: mx.array, cache: Any) -> mx.array:
            raise TypeError("this model changes keys")

    layout = probe_layout(mlx_lm.load(str(tiny_model("llama")))[0])
    assert not GPUBatch.tried(Model(), layout, UNQUANTIZED, 64).kernels and not runs
