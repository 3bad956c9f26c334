"""Proofs that passed are not repeated, unless something that they depend on has changed."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from engine.backend import kept_files
from engine.cache.layout import Layout, probe_layout
from engine.cache.quantization import Precision
from engine.cpu import layers
from engine.proving import choose, remembered
from engine.proving.remembered import ProofRecord, ProvenBatches
from engine.proving.trial import Trial
from tests.engine.conftest import Wrap
from tests.engine.whole import Whole
from tests.tiny_models import make_quantized, make_tiny
from zoo.build import build

PROMPTS = ([5, 9, 11], [7] * 20)


@pytest.fixture
def proofs(wrap: Wrap) -> list[object]:
    """Return a list that grows by one with each proof."""
    made: list[object] = []

    @wrap(choose, "prove")
    def noted(prove: Callable[..., None], *given: Any) -> None:
        made.append(given)
        prove(*given)

    return made


def texts(whole: Whole) -> dict[str, list[int]]:
    for number, prompt in enumerate(PROMPTS):
        whole.submit(f"{number}", prompt, 6)
    whole.run()
    return whole.texts


@pytest.mark.parametrize(
    ("kind", "kv_bits", "codes"),
    [("llama", 8, False), ("gemma3", 16, True), ("jamba", 8, True)],
)
def test_a_second_start_proves_nothing_and_answers_the_same(
    kind: Any,
    kv_bits: int,
    codes: bool,
    tiny_model: Callable[..., Path],
    tmp_path: Path,
    proofs: list[object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Which layers leave MLX is measured at each start, and beside other work it changes.
    monkeypatch.setattr(layers, "WORTH_IT", 1e9)
    path = tiny_model(kind)
    if codes:
        path = make_quantized(path, tmp_path / "model")
    first = Whole(path, proofs=tmp_path / "proofs", kv_bits=kv_bits)
    expected = texts(first)
    assert proofs
    proofs.clear()
    again = Whole(path, proofs=tmp_path / "proofs", kv_bits=kv_bits)
    assert not proofs
    assert again.executor.spec == first.executor.spec
    assert texts(again) == expected


def test_whatever_a_proof_depends_on_makes_another(
    llama: Path, tmp_path: Path, proofs: list[object]
) -> None:
    def starts(path: Path = llama, **settings: Any) -> bool:
        """Return whether a start proves anything."""
        proofs.clear()
        Whole(path, proofs=tmp_path / "proofs", **settings)
        return bool(proofs)

    assert starts() and not starts()
    assert starts(kv_bits=4) and starts(block_size=32)
    assert starts(make_tiny("llama", tmp_path / "other", seed=1))
    assert starts(prove="always") and not starts()


def test_a_gpus_free_memory_makes_no_other_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX describes a GPU of CUDA with what is free, and which card it is."""
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))

    def machine(**device: object) -> list[object]:
        monkeypatch.setattr(mx, "device_info", lambda: device)
        return remembered._machine()

    one = machine(device_name="H100", free_memory=1, uuid="a", pci_bus_id="0")
    assert machine(device_name="H100", free_memory=2, uuid="b", pci_bus_id="1") == one
    assert machine(device_name="H200", free_memory=1, uuid="a", pci_bus_id="0") != one


def test_the_machine_and_the_engines_own_code_and_versions_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = probe_layout(build("llama"))
    ProofRecord(tmp_path, 1).write(ProvenBatches.of(Layout, layout, "", ""))
    assert ProofRecord(tmp_path, 1).read() is not None
    assert ProofRecord(tmp_path, 2).read() is None
    (code := tmp_path / "code.py").write_text("a = 1\n")
    before = remembered.code_digest([code])
    code.write_text("a = 2\n")
    assert remembered.code_digest([code]) != before
    monkeypatch.setattr(remembered, "code_digest", lambda files: f"{len(list(files)) > 50}")
    assert ProofRecord(tmp_path, 1).read() is None
    monkeypatch.undo()
    for owner, name in ((metadata, "version"), (remembered, "_machine")):
        with monkeypatch.context() as changed:
            changed.setattr(owner, name, lambda *_: "another")
            assert ProofRecord(tmp_path, 1).read() is None
    assert ProofRecord(tmp_path, 1).read() is not None


@pytest.mark.parametrize("name", ["gemma3_text", "mamba2", "jamba", "falcon_h1", "deepseek_v3"])
def test_layouts_are_remembered_as_they_are(name: str, tmp_path: Path) -> None:
    layout = probe_layout(build(name))
    kept = layout.with_precision(Precision(8, 64))
    record = ProofRecord(tmp_path)
    record.write(ProvenBatches.of(Layout, kept, "a reason", "a layer"))
    found = record.read()
    assert found is not None
    assert found.layout == kept and kept.is_of(layout)
    assert (found.batch, found.reason, found.unquantized) == ("Layout", "a reason", "a layer")


@pytest.mark.parametrize("damage", [b"", b"\n", b"nothing\n{}"])
def test_damaged_records_are_ignored_and_replaced(damage: bytes, tmp_path: Path) -> None:
    proven = ProvenBatches.of(Layout, probe_layout(build("llama")), "", "")
    record = ProofRecord(tmp_path)
    record.write(proven)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    for bad in (damage, whole[:-1], whole.replace(b"float32", b"float16", 1)):
        path.write_bytes(bad)
        assert record.read() is None
    record.write(proven)
    assert record.read() == proven


def test_the_oldest_records_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_files, "MAX_FILES", 3)
    proven = ProvenBatches.of(Layout, probe_layout(build("llama")), "", "")
    for number in range(5):
        for path in tmp_path.iterdir():  # each is older than the next
            os.utime(path, (path.stat().st_mtime - 10,) * 2)
        ProofRecord(tmp_path, number).write(proven)
    known = [ProofRecord(tmp_path, number).read() is not None for number in range(5)]
    assert known == [False, False, True, True, True]


def test_a_folder_that_cannot_be_written_costs_only_the_proof(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    record = ProofRecord(tmp_path / "file" / "proofs")
    record.write(ProvenBatches.of(Layout, probe_layout(build("llama")), "", ""))
    assert record.read() is None
    record.forget()


def test_a_class_reached_because_memory_ran_out_is_not_remembered(
    llama: Path, tmp_path: Path, proofs: list[object], wrap: Wrap
) -> None:
    """Another program may have used it: the next start proves again."""
    raise_once(wrap, "[malloc] Unable to allocate 12582912 bytes.")
    slow = Whole(llama, proofs=tmp_path / "proofs")
    assert len(proofs) > 1
    proofs.clear()
    fast = Whole(llama, proofs=tmp_path / "proofs")
    assert proofs
    assert fast.executor.batch_class is not slow.executor.batch_class  # type: ignore[attr-defined]


def test_an_error_of_the_device_says_nothing_about_batches(
    llama: Path, tmp_path: Path, wrap: Wrap
) -> None:
    """It ends the start, which the supervisor repeats."""
    raise_once(wrap, "[METAL] Command buffer execution failed: Caused GPU Timeout Error.")
    with pytest.raises(RuntimeError, match="GPU Timeout"):
        Whole(llama, proofs=tmp_path / "proofs")


def raise_once(wrap: Wrap, message: str) -> None:
    """Let the next trial raise."""
    errors = iter([RuntimeError(message)])

    @wrap(Trial, "run_short")
    def raising(run_short: Callable[..., None], *given: Any) -> None:
        for error in errors:
            raise error
        run_short(*given)
