"""Decode steps of rows with different adapters, beside the same steps without any."""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from bench.in_process import InProcessEngine
from engine.adapters.checkpoint import AdapterWeights, LowRank
from engine.adapters.places import AdapterPlaces
from engine.model.load import resolve
from services.measuring.executor_steps import WARM_UP_STEPS, noise

ROWS, RANK = 8, 16
CONTEXT_TOKENS, STEPS = 200, 12
WIDE: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 49152,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
"""Four layers of TinyLlama 1.1B, with random weights and the demo's vocabulary."""
_TARGETS = {"attention": ("q_proj", "v_proj"), "all layers": ("",)}
"""Layers with adapters: those in mlx-lm's and PEFT's first examples, and all."""


def adapters(model: str, runs: int) -> None:
    """Print a step of 8 rows without adapters, with one for all, and with 8, in turn; and a step
    of an engine without adapter support. With ``--model wide``, use a random model with wide
    layers."""
    if model != "wide":
        _steps(model, runs, model)
        return
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        _write_wide(Path(scratch))
        _steps(scratch, runs, "four layers of TinyLlama's size")


def _steps(model: str, runs: int, name: str) -> None:
    prompts = [noise(seed, CONTEXT_TOKENS) for seed in range(ROWS)]
    plain = InProcessEngine(model)
    engine = InProcessEngine(model, max_adapters=ROWS, max_adapter_rank=RANK)
    assert engine.replica.adapters is not None
    ways = {
        "no --adapter": (plain, [0] * ROWS),
        "none": (engine, [0] * ROWS),
        "one": (engine, [1] * ROWS),
        "eight": (engine, list(range(1, ROWS + 1))),
    }
    for targets, ends in _TARGETS.items():
        _fill(engine.replica.adapters.places, ends)
        times: dict[str, list[float]] = {way: [] for way in ways}
        for run in range(runs + 1):
            for way in list(ways)[:: 1 if run % 2 else -1]:
                one, places = ways[way]
                times[way].append(one.step_s(prompts, STEPS, WARM_UP_STEPS, places))
        shown = {way: each[1:] for way, each in times.items()}  # the first run computes prompts
        figures = ", ".join(f"{way} {1e3 * min(each):.1f}" for way, each in shown.items())
        print(
            f"{name}, rank {RANK}, {targets}: {figures} ms; with eight "
            f"{_ratio(shown, 'none'):.2f} times none, {_ratio(shown, 'no --adapter'):.2f} times a "
            "step of an engine without --adapter",
            flush=True,
        )


def _ratio(times: dict[str, list[float]], way: str) -> float:
    pairs = zip(times["eight"], times[way], strict=True)
    return statistics.median(with_them / without for with_them, without in pairs)


def _fill(places: AdapterPlaces, ends: tuple[str, ...]) -> None:
    """Put a small random adapter into each place, for layers whose names end with ``ends``."""
    random = np.random.default_rng(0)
    assert places.store is not None
    for place in range(1, places.count + 1):
        layers = {
            layer: LowRank(
                random.standard_normal((shape.inputs, RANK), np.float32) / 1e3,
                random.standard_normal((RANK, shape.outputs), np.float32) / 1e3,
            )
            for layer, shape in places.shapes.items()
            if layer.endswith(ends)
        }
        places.store.put(place, AdapterWeights(layers=layers, digest=str(place)).layers)


def _write_wide(folder: Path) -> None:
    """Write a model of `WIDE` with the demo's tokenizer."""
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.models.llama import Model, ModelArgs

    for file in resolve("demo").glob("*token*"):
        shutil.copy(file, folder)
    made = Model(ModelArgs.from_dict(WIDE))
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(made.parameters())))
    (folder / "config.json").write_text(json.dumps(WIDE))
