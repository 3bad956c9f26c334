"""The step in flight fails while another part uses the device: the step's sequences start again,
none of its tokens is sent, and the other part has no error."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from engine.adapters.checkpoint import LowRank, Shape
from engine.adapters.layers import Factors, linear_layers, shape_of
from engine.adapters.places import AdapterPlaces
from engine.backend.gpu_path import forced_gpu_path
from engine.executor.batched import BatchedExecutor
from engine.executor.hidden import HiddenStates
from engine.model.load import load
from engine.speculation.batched import BatchDrafting
from tests.engine.adapters.random_adapters import random_adapter
from tests.engine.conftest import Wrap
from tests.engine.stream_errors import BrokenPiece
from tests.engine.whole import Whole
from tests.tiny_models import make_tiny

Break = Callable[[Whole], BrokenPiece]
TOKENS = 30
ROTATION = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}


@pytest.fixture(autouse=True, scope="module")
def on_a_gpu() -> Iterator[None]:
    with forced_gpu_path():
        yield


def prompt(number: int, length: int) -> list[int]:
    return [3 + (7 + number) * (i + 1) % 250 for i in range(length)]


def run(whole: Whole) -> dict[str, list[int]]:
    """Start a request every third turn, run them, and return their outputs."""
    for number, length in enumerate((5, 60)):
        whole.submit(f"r{number}", prompt(number, length), TOKENS)
        whole.turns(3)
    whole.run()
    return whole.texts


@pytest.fixture
def break_piece(tmp_path: Path, wrap: Wrap) -> Break:
    """Return a function that puts an engine in the state of a new one, and breaks a piece later."""

    def make(whole: Whole) -> BrokenPiece:
        whole.renew(look_ahead=True)
        return BrokenPiece(whole, tmp_path / "broken.npy", wrap)

    return make


def test_a_draft_model_does_not_take_the_error_of_its_target(
    llama: Path, wrap: Wrap, break_piece: Break
) -> None:
    drafting = {"spec_decode": "draft", "draft_model_path": str(llama)}
    whole = Whole(llama, no_ssd=True, num_blocks=300, spec_decode_dynamic=False, **drafting)
    expected = run(whole)
    broken = break_piece(whole)

    @wrap(BatchDrafting, "propose")
    def asked(propose: Callable[..., Any], *args: Any) -> Any:
        broken.send()
        return propose(*args)

    assert run(whole) == expected
    broken.check()
    model = whole.replica.draft_model
    assert model is not None and not model._failures


def test_an_adapter_that_gets_a_place_does_not_take_the_error_of_the_step(
    llama: Path, tmp_path: Path, wrap: Wrap, break_piece: Break
) -> None:
    shapes = {name: shape_of(one) for name, one in linear_layers(load(llama).model).items()}
    folders = [random_adapter(shapes, tmp_path / f"a{number}", number) for number in range(2)]
    flags = tuple(f"a{number}={folder}" for number, folder in enumerate(folders))
    whole = Whole(llama, no_ssd=True, num_blocks=300, adapter=flags, max_adapters=1)
    assert whole.replica.adapters is not None
    _, second = whole.replica.adapters.of_settings  # the first has the only place

    def ask() -> dict[str, list[int]]:
        whole.submit("plain", prompt(0, 5), 8 * TOKENS)  # still runs when the adapter was read
        whole.turns(3)  # and runs already
        whole.serve("adapted", prompt(1, 20), TOKENS, adapter=second)
        return whole.texts

    expected = ask()
    broken = break_piece(whole)
    whole.replica.adapters.places._places.clear()

    @wrap(AdapterPlaces, "put")
    def put_beside_a_step(put: Callable[..., int | None], *args: Any) -> int | None:
        broken.send()
        return put(*args)

    assert ask() == expected
    broken.check()


def test_a_chunk_whose_model_evaluates_does_not_take_the_error_of_the_step(
    llama: Path, wrap: Wrap, break_piece: Break
) -> None:
    """Some models' code reads values while the graph is built."""
    whole = Whole(llama, no_ssd=True, num_blocks=300)
    expected = run(whole)
    broken = break_piece(whole)
    assert isinstance(whole.executor, BatchedExecutor)

    @wrap(whole.executor.batch_class, "logits")
    def reads_values(logits: Callable[..., mx.array], *args: Any, **more: Any) -> mx.array:
        if more.get("kv_only"):
            broken.send()
            assert (mx.ones(2) + 1).tolist() == [2, 2]
        return logits(*args, **more)

    assert run(whole) == expected
    broken.check()


def test_factors_that_the_device_could_not_write_are_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Metal may report only after `mx.eval` that it failed. Other places are in the same arrays."""
    ones = LowRank(np.ones((8, 4), np.float32), np.ones((4, 8), np.float32))
    factors = Factors(Shape(8, 8), 2, 4)
    factors.put(1, ones)
    before = factors.down, factors.up

    def synchronize() -> None:
        raise RuntimeError("[METAL] Command buffer execution failed: Insufficient Memory.")

    with monkeypatch.context() as patch:
        patch.setattr(mx, "synchronize", synchronize)
        with pytest.raises(RuntimeError, match="Insufficient Memory"):
            factors.put(2, LowRank(2 * ones.down, 2 * ones.up))
    assert (factors.down, factors.up) == before
    factors.put(2, ones)
    assert factors.down is not None
    assert factors.down.sum(axis=(1, 2)).tolist() == [0, 32, 32]


def test_arrays_that_outlive_a_step_are_not_computed_in_it(tmp_path: Path) -> None:
    """Those of a step that fails are never written, and count as computed."""
    kept = [HiddenStates(4, mx.float32)._unknown]
    model = load(make_tiny("llama", tmp_path / "model", rope_scaling=ROTATION)).model
    frequencies = [m._freqs for m in model.modules() if "_freqs" in m]
    assert frequencies
    for array in kept + frequencies:
        assert not kernels_of(array)
    assert kernels_of(mx.arange(3) + 1), "this finds them"


def kernels_of(array: mx.array) -> set[str]:
    """Return the operations, other than views, that are still to compute for ``array``."""
    file = io.StringIO()
    mx.export_to_dot(file, array)
    names = set(re.findall(r'label ="(\w+)"', file.getvalue()))
    return names - {"Broadcast", "Reshape", "ExpandDims"}
