"""Engines whose model has quantized weights, on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn

from engine.replica import memory
from tests.engine.conftest import Wrap
from tests.engine.whole import Whole
from tests.tiny_models import make_quantized

pytestmark = pytest.mark.skipif(mx.default_device() == mx.gpu, reason="for CPUs")


@pytest.mark.parametrize(
    ("kind", "precision"),  # layer by layer, and as a whole
    [("gpt_oss", "exact"), ("gpt_oss", "fast"), ("qwen3", "compact"), ("qwen3", "fast")],
)
def test_requests_are_batched_and_weights_are_in_memory_once(
    kind: Any, precision: str, tiny_model: Callable[..., Path], tmp_path: Path, wrap: Wrap
) -> None:
    """In fast precision, texts are the same alone and together."""
    charged: list[int] = []

    @wrap(memory, "size_memory")
    def noted(size_memory: Callable[..., memory.MemorySizes], *given: Any) -> memory.MemorySizes:
        charged.append(given[3])
        return size_memory(*given)

    path = make_quantized(tiny_model(kind), tmp_path / "quantized")
    whole = Whole(path, cpu_precision=precision)
    linears = [
        m for _, m in whole.loaded.model.named_modules() if isinstance(m, nn.QuantizedLinear)
    ]
    arrays = [array for linear in linears for name, array in linear.items() if name != "bias"]
    assert linears and not any(array.size for array in arrays if isinstance(array, mx.array))
    assert whole.executor.spec.batching == "ragged"
    assert charged[0] > 10_000
    prompts = [[5 + i, 9, 80 + i] * (i + 1) for i in range(5)]
    for number, prompt in enumerate(prompts):
        whole.submit(f"together {number}", prompt, 16)
    whole.run()
    together = [whole.texts[f"together {number}"] for number in range(5)]
    assert all(len(text) == 16 for text in together)
    if precision == "fast":
        assert [whole.serve("alone", prompt, 16) for prompt in prompts] == together


def test_blocks_are_found_by_engines_that_multiply_the_same_way(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """Keys have other bits with activations in 8 bits, and with codes in the place of fp32."""
    path = make_quantized(tiny_model("qwen3"), tmp_path / "q")

    def root(precision: str, path: Path = path) -> bytes:
        return Whole(path, cpu_precision=precision).replica.namespace

    assert root("exact") == root("auto")
    assert len({root("exact"), root("compact"), root("fast")}) == 3
    dense = tiny_model("qwen3")
    assert root("exact", dense) == root("fast", dense)


def test_engines_with_other_kv_bits_or_block_sizes_share_no_blocks(llama: Path) -> None:
    kinds: list[dict[str, int]] = [{}, {"kv_bits": 8}, {"kv_bits": 4}, {"block_size": 32}]
    roots = {Whole(llama, **kind).replica.namespace for kind in kinds}
    assert len(roots) == len(kinds)
