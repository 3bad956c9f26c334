"""A long prompt for a mixture of experts, each chunk of which reads nearly all experts.

The model is random, with 4-bit codes. It has as many experts as Qwen3-30B-A3B, a quarter of the
width, and a twelfth of the layers."""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from bench.prompt_times.measuring import FLAGS, Options, first_s, ms
from bench.servers import ours
from bench.serving.growth import counters_of
from engine.model.load import resolve

TOKENS, FIXED_CHUNK = 2048, 256
CHECK_LAYERS = 1
GROUP, BITS = 64, 4
CONFIG: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 512,
    "intermediate_size": 1536,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 49_152,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "quantization": {"group_size": GROUP, "bits": BITS},
}
PASSES = "prefill_passes_total"
_HEARTBEATS_S = 1.5
"""Counters arrive with heartbeats: this long after a prompt they are complete."""


def experts(options: Options) -> None:
    """Print the time of a prompt in chunks of the default length and in short ones, and how many
    bytes of experts these read.

    The bytes are an upper bound: that each chunk reads all experts of each layer. If the choices
    of its tokens were random, of 100,000 chunks of 256 one would leave out an expert."""
    config = CONFIG | ({"num_hidden_layers": CHECK_LAYERS} if options.check else {})
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch, ExitStack() as stack:
        weights = write(Path(scratch), config)
        print(
            f"{config['num_hidden_layers']} layers of {config['num_experts']} experts, "
            f"{config['num_experts_per_tok']} chosen, hidden {config['hidden_size']}: experts of "
            f"{weights / 1e6:.0f} MB; {' '.join(FLAGS)} --kv-bits 16",
            flush=True,
        )
        fixed = ("--prefill-chunk-tokens", str(FIXED_CHUNK))
        ports = {
            name: options.start(stack, ours(scratch, *FLAGS, *flags))
            for name, flags in (("default", ()), (f"chunks of {FIXED_CHUNK}", fixed))
        }
        before = _counted(ports)
        found = options.in_turn(
            {
                name: partial(_first, port=port, tokens=512 if options.check else TOKENS)
                for name, port in ports.items()
            }
        )
        after = _counted(ports)
    for name, times in found.items():
        chunks = (after[name] - before[name]) / options.runs
        print(
            f"{name}: {ms(statistics.median(times))}, {chunks:.1f} chunks, "
            f"at most {chunks * weights / 1e9:.2f} GB of experts read",
            flush=True,
        )
    mine, short = found.values()
    ratio = statistics.median(a / b for a, b in zip(mine, short, strict=True))
    print(f"by default {ratio:.2f} x the time of chunks of {FIXED_CHUNK}", flush=True)


def _first(run: int, port: int, tokens: int) -> float:
    return first_s(port, 1000 * run + 5, tokens)


def _counted(ports: Mapping[str, int]) -> dict[str, float]:
    time.sleep(_HEARTBEATS_S)
    return {name: counters_of(port, (PASSES,))[PASSES] for name, port in ports.items()}


def write(path: Path, config: dict[str, Any]) -> int:
    """Write a checkpoint of random codes into ``path``; return the bytes of its experts."""
    import mlx.core as mx
    import numpy as np
    from mlx import nn
    from mlx.utils import tree_flatten
    from mlx_lm.models import qwen3_moe

    rng = np.random.default_rng(0)
    model = qwen3_moe.Model(qwen3_moe.ModelArgs.from_dict(config))
    nn.quantize(
        model,
        GROUP,
        BITS,
        class_predicate=lambda name, module: (
            hasattr(module, "to_quantized") and not name.endswith("mlp.gate")
        ),
    )
    arrays, weights = {}, 0
    for name, shaped in tree_flatten(model.parameters()):  # nothing is computed with it
        scale = 0.1 * config["hidden_size"] ** -0.5
        if shaped.dtype == mx.uint32:
            array = mx.array(rng.integers(0, 1 << 32, shaped.shape, np.uint32))
        elif name.endswith("scales"):
            array = mx.full(shaped.shape, scale, mx.bfloat16)
        elif name.endswith("biases"):
            array = mx.full(shaped.shape, -7.5 * scale, mx.bfloat16)
        elif shaped.ndim == 1:
            array = mx.ones(shaped.shape, mx.bfloat16)
        else:  # a router
            array = mx.random.normal(shaped.shape, mx.bfloat16)
        arrays[name] = array
        weights += array.nbytes if "switch_mlp" in name else 0
    mx.save_safetensors(str(path / "model.safetensors"), arrays, metadata={"format": "mlx"})
    (path / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(resolve("demo-4bit") / name, path / name)
    return weights
