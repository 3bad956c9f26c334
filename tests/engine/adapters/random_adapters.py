"""Random LoRA adapters of models, in both formats."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from engine.adapters.checkpoint import Shape

SCALE = 2.0


def random_adapter(
    shapes: Mapping[str, Shape], path: Path, seed: int, *, rank: int = 4, peft: bool = False
) -> Path:
    """Write an adapter of layers with ``shapes`` into ``path``, and return ``path``. It changes
    most of a random model's answers."""
    random = np.random.default_rng(seed)
    weights, path = {}, Path(path)
    for name, (inputs, outputs) in shapes.items():
        down = random.standard_normal((inputs, rank), np.float32) / np.float32(inputs**0.5)
        up = random.standard_normal((rank, outputs), np.float32) / np.float32(rank**0.5)
        if peft:
            weights[f"base_model.model.{name}.lora_A.weight"] = np.ascontiguousarray(down.T)
            weights[f"base_model.model.{name}.lora_B.weight"] = np.ascontiguousarray(up.T)
        else:
            weights[f"{name}.lora_a"], weights[f"{name}.lora_b"] = down, up
    path.mkdir(parents=True, exist_ok=True)
    save_file(weights, path / ("adapter_model.safetensors" if peft else "adapters.safetensors"))
    config: dict[str, object]
    if peft:
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": SCALE * rank, "bias": "none"}
    else:
        keys = sorted({name.split(".", 3)[3] for name in shapes if name.count(".") >= 3})
        parameters = {"rank": rank, "scale": SCALE, "dropout": 0.0, "keys": keys}
        config = {"fine_tune_type": "lora", "num_layers": -1, "lora_parameters": parameters}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path
