"""Pictures in requests that name adapters: prefixes are told apart by both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from mlx import nn

from engine.adapters.layers import linear_layers, shape_of
from engine.model.load import load
from tests.engine.adapters.random_adapters import SCALE, random_adapter
from tests.engine.vision_requests import Request, VisionOracle
from tests.engine.whole import Whole
from tests.vision_models import make_vision_model, needs_mlx_vlm, picture

needs_mlx_vlm()

TOKENS = 6
CLOSE = 2e-4


def merge(model: nn.Module, adapter: Path, sign: int) -> None:
    """Add an adapter to the weights of mlx-vlm's language model, or take it off again."""
    import mlx.core as mx

    weights = mx.load(str(adapter / "adapters.safetensors"))
    layers = dict(model.language_model.named_modules())
    for name in {key.rpartition(".")[0] for key in weights}:
        own = name[name.index("layers.") :]
        (layer,) = (one for key, one in layers.items() if key.endswith(own))
        added = weights[f"{name}.lora_a"] @ weights[f"{name}.lora_b"]
        layer.weight = layer.weight + sign * SCALE * added.T


def test_a_prefix_is_found_with_the_same_picture_and_the_same_adapter_alone(tmp_path: Path) -> None:
    path = make_vision_model("idefics3", tmp_path / "model")
    layers = linear_layers(load(path).model)
    shapes = {name: shape_of(layer) for name, layer in layers.items() if "self_attn" in name}
    paths = [random_adapter(shapes, tmp_path / str(seed), seed) for seed in range(2)]
    flags = tuple(f"a{number}={each}" for number, each in enumerate(paths))
    settings: dict[str, Any] = {"block_size": 4, "num_blocks": 800, "no_ssd": True}
    whole = Whole(path, adapter=flags, **settings)
    assert whole.replica.vision is not None and whole.replica.adapters is not None
    oracle = VisionOracle(path, whole.replica.vision.vision)
    refs = whole.replica.adapters.of_settings

    def run(name: str, request: Request, number: int | None) -> bool:
        """Compute a request, compare it with mlx-vlm's answer, and return whether a prefix was
        found."""
        adapter = None if number is None else refs[number]
        fields = {"logprobs": 1, "adapter": adapter, **request.fields}
        answer = whole.serve(name, request.token_ids, TOKENS, **fields)
        assert not whole.refused, whole.refused
        if number is not None:
            merge(oracle._model, paths[number], 1)
        found = oracle.logprobs(request, answer)[np.arange(len(answer)), answer]
        if number is not None:
            merge(oracle._model, paths[number], -1)
        assert np.abs(found - whole.scores(name)).max() < CLOSE, name
        return whole.usage(name).cached_ram_tokens > 8

    one, other = (oracle.request("<> what is this?", picture(seed)) for seed in (1, 2))
    asked = [(one, 0), (one, None), (one, 1), (other, 1), (one, 1), (one, None), (other, 1)]
    found = [run(f"r{i}", request, number) for i, (request, number) in enumerate(asked)]
    assert found == [False, False, False, False, True, True, True]
