"""Decode steps of rows with different adapters, beside the same steps without any."""

from __future__ import annotations

import json
import re
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench.executor_steps import DecodeSteps
from bench.in_process import InProcessEngine
from engine.adapters.checkpoint import AdapterWeights, LowRank
from engine.adapters.places import AdapterPlaces
from engine.model.load import resolve

ROWS = 8
CONTEXT_TOKENS, STEPS_OF_A_RUN = 200, 12
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


class AdapterKind(NamedTuple):
    """Adapters of one kind."""

    rank: int
    targets: tuple[str, ...] = ("",)  # ends of the names of linear layers
    last_blocks: int | None = None  # None: all blocks of the model


KINDS = {
    "what mlx_lm.lora trains by default": AdapterKind(8, last_blocks=16),
    "q_proj and v_proj": AdapterKind(16, ("q_proj", "v_proj")),
    "all linear layers": AdapterKind(16),
}
"""mlx_lm.lora's defaults are ``num_layers`` 16, rank 8, and all linear layers of these blocks
(`CONFIG_DEFAULTS` in mlx_lm/lora.py, `linear_to_lora_layers` in mlx_lm/tuner/utils.py)."""
_BLOCK = re.compile(r"\.layers\.(\d+)\.")


def adapters(model: str, runs: int) -> None:
    """Print steps of 8 rows without adapters, with one for all, and with 8, and of an engine
    without adapter support, step by step in turn. With ``--model wide``, use a random model with
    wide layers."""
    if model != "wide":
        _steps(model, runs, model)
        return
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        _write_wide(Path(scratch))
        _steps(scratch, runs, "four layers of TinyLlama's size")


def _steps(model: str, runs: int, name: str) -> None:
    plain = InProcessEngine(model)
    engine = InProcessEngine(model, max_adapters=ROWS)
    assert engine.replica.adapters is not None
    for named, kind in KINDS.items():
        _fill(engine.replica.adapters.places, kind)
        times = _times(engine, plain, max(1, runs) * STEPS_OF_A_RUN)
        figures = ", ".join(f"{way} {1e3 * min(each):.1f}" for way, each in times.items())
        print(
            f"{name}, {named}, rank {kind.rank}: {figures} ms; with eight "
            f"{_ratio(times, 'none')} times none, {_ratio(times, 'no --adapter')} times a "
            "step of an engine without --adapter",
            flush=True,
        )


def _times(engine: InProcessEngine, plain: InProcessEngine, steps: int) -> dict[str, list[float]]:
    """Return the seconds of ``steps`` steps of each way, which follow each other step by step: the
    machine's speed changes over longer times. ``engine`` runs its three on the same sequences."""
    places = {"none": [0] * ROWS, "one": [1] * ROWS, "eight": list(range(1, ROWS + 1))}
    times: dict[str, list[float]] = {"no --adapter": [], **{way: [] for way in places}}
    lengths = [CONTEXT_TOKENS] * ROWS
    with (
        DecodeSteps(engine.replica.executor, lengths, len(places) * steps) as ours,
        DecodeSteps(plain.replica.executor, lengths, len(places) * steps) as theirs,
    ):
        for number in range(steps):
            for way in list(times)[:: 1 if number % 2 else -1]:
                steps_of = theirs.step_s if way not in places else ours.step_s
                times[way].append(steps_of(places.get(way, ())))
            for _ in range(len(places) - 1):  # as many tokens as the other's sequences
                theirs.step_s(())
    return times


def _ratio(times: dict[str, list[float]], way: str) -> str:
    pairs = zip(times["eight"], times[way], strict=True)
    low, median, high = statistics.quantiles((a / b for a, b in pairs), n=4)
    return f"{median:.2f} (quarters {low:.2f} to {high:.2f})"


def _fill(places: AdapterPlaces, kind: AdapterKind) -> None:
    """Put a small random adapter of ``kind`` into each place."""
    random = np.random.default_rng(0)
    assert places.store is not None
    blocks = {name: int(found[1]) for name in places.shapes if (found := _BLOCK.search(name))}
    first = 0 if kind.last_blocks is None else max(blocks.values()) + 1 - kind.last_blocks
    for place in range(1, places.count + 1):
        layers = {
            layer: LowRank(
                random.standard_normal((shape.inputs, kind.rank), np.float32) / 1e3,
                random.standard_normal((kind.rank, shape.outputs), np.float32) / 1e3,
            )
            for layer, shape in places.shapes.items()
            if layer.endswith(kind.targets) and blocks.get(layer, 0) >= first
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
