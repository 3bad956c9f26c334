"""What fits beside a model: the forecast beside engines that were really built, and beside the
arithmetic of docs/design/memory.md for large models."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from engine.replica import memory
from engine.replica.forecast import forecast
from shared.settings import Settings
from tests.engine.whole import Whole

GB = 10**9
_TYPES = {mx.bfloat16: "BF16", mx.uint32: "U32", mx.uint8: "U8", mx.float32: "F32"}


@pytest.mark.parametrize("kind", ["llama", "gemma3", "jamba"])
def test_a_forecast_is_what_an_engine_then_has(tiny_model: Callable[..., Path], kind: str) -> None:
    given: dict[str, Any] = {"memory_gb": 1.2, "kv_bits": 8, "completion_batch_size": 4}
    whole = Whole(tiny_model(kind), **given)
    found = forecast(tiny_model(kind), Settings(**given))
    config, planned = whole.replica.scheduler.config, found.config
    assert found.context_length == whole.loaded.context_length
    assert (planned.block_bytes, planned.state_bytes) == (config.block_bytes, config.state_bytes)
    assert planned.gather_token_bytes == config.gather_token_bytes
    # Dense layers that move to ONNX Runtime since they were measured to be faster there.
    assert planned.limit_bytes == pytest.approx(config.limit_bytes, abs=2 << 20)
    assert found.context(1) == pytest.approx(whole.scheduler.context_length, rel=0.01)


@dataclass(frozen=True)
class LargeModel:
    """The parameters of a public model in 4 bits, and what they come to by hand."""

    config: dict[str, Any]
    weights_gb: float
    token_bytes: int  # 8-bit KV: codes, and a scale in 16 bits for 64 elements
    gathered_bytes: int  # the values of three layers in 16 bits


def _qwen3(layers: int, hidden: int, heads: int, kv_heads: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "vocab_size": 151936,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
        **more,
    }


def _by_hand(layers: int, kv_heads: int) -> tuple[int, int]:
    """Heads of 128: a position has keys and values of ``kv_heads`` heads in each layer."""
    return 2 * layers * kv_heads * (128 + 128 // 64 * 2), 3 * 2 * kv_heads * 2 * 128


LARGE = {
    "4B": LargeModel(
        _qwen3(36, 2560, 32, 8, intermediate_size=9728, tie_word_embeddings=True),
        2.26,
        *_by_hand(36, 8),
    ),
    "32B": LargeModel(_qwen3(64, 5120, 64, 8, intermediate_size=25600), 18.4, *_by_hand(64, 8)),
    "30B of experts": LargeModel(
        _qwen3(
            *(48, 2048, 32, 4),
            intermediate_size=6144,
            model_type="qwen3_moe",
            moe_intermediate_size=768,
            num_experts=128,
            num_experts_per_tok=8,
            decoder_sparse_step=1,
            mlp_only_layers=[],
            norm_topk_prob=True,
        ),
        17.2,
        *_by_hand(48, 4),
    ),
    "70B": LargeModel(
        _qwen3(80, 8192, 64, 8, intermediate_size=28672, model_type="llama", vocab_size=128256),
        39.7,
        *_by_hand(80, 8),
    ),
}


def make_hollow(path: Path, config: dict[str, Any]) -> Path:
    """Write a model directory of full size whose weights take no room on the disk."""
    quantized = config | {"quantization": {"group_size": 64, "bits": 4}}
    (path / "config.json").write_text(json.dumps(quantized))
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(config))
    model.set_dtype(mx.bfloat16)
    nn.quantize(model, group_size=64, bits=4)
    header, end = {}, 0
    for name, array in tree_flatten(model.parameters()):
        assert array.nbytes == prod(array.shape) * array.dtype.size
        offsets = [end, end + array.nbytes]
        header[name] = {"dtype": _TYPES[array.dtype], "shape": array.shape, "data_offsets": offsets}
        end = offsets[1]
    text = json.dumps(header).encode()
    with (path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return path


@pytest.mark.parametrize(
    ("name", "memory_gb", "fits"),
    [
        *(("4B", 16, True), ("30B of experts", 64, True), ("32B", 64, True), ("70B", 32, False)),
    ],
)
def test_large_models_fit_on_macs_as_the_arithmetic_says(
    name: str, memory_gb: int, fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large, settings = LARGE[name], Settings()
    path = make_hollow(tmp_path, large.config)
    working_set = memory_gb << 30
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(
        mx, "device_info", lambda: {"max_recommended_working_set_size": working_set}
    )
    found = forecast(path, settings)
    assert found.weights_bytes / GB == pytest.approx(large.weights_gb, rel=0.02)
    tables = 2 * settings.completion_batch_size * found.context_length * 4
    left = working_set - found.weights_bytes - tables - (512 << 20) - (1 << 30)
    assert found.fits == fits
    block_bytes = 16 * large.token_bytes
    least = max(memory.FEWEST_BLOCKS, min(memory.MIN_BLOCKS, int(max(left, 0)) // block_bytes))
    blocks = max(least, int(max(left, 0) * 0.6) // block_bytes)
    assert found.sizes.num_blocks == blocks
    for sequences in (1, 8):
        page_bytes = 64 * (sequences * large.token_bytes + large.gathered_bytes)
        by_hand = blocks * block_bytes // page_bytes * 64
        assert found.context(sequences) == (min(by_hand, found.context_length) if fits else 0)


def test_a_checkpoint_with_a_vision_tower_has_a_forecast(llama: Path, tmp_path: Path) -> None:
    """mlx-lm knows only the language model in it."""
    text = json.loads((llama / "config.json").read_text())
    config = {"model_type": "idefics3", "text_config": text, "vision_config": {"depth": 1}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded: Any = mx.load(str(llama / "model.safetensors"))
    weights = {name.replace("model.", "model.text_model.", 1): loaded[name] for name in loaded}
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights, metadata={"format": "mlx"})
    given = Settings(memory_gb=1.2)
    assert forecast(tmp_path, given).weights_bytes == forecast(llama, given).weights_bytes
