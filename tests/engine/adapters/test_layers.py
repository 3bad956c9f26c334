"""Layers of models that compile themselves where Metal is."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from engine.adapters.checkpoint import LowRank
from engine.adapters.layers import applied
from engine.replica.adapters import adaptable
from shared.settings import Settings
from zoo.build import build

COUNT, RANK = 2, 4


def test_a_layer_that_compiles_itself_uses_the_adapters_of_each_pass() -> None:
    model = build("kimi_k3")
    found = adaptable(model, Settings(max_adapters=COUNT, max_adapter_rank=RANK))
    assert found is not None
    for place in range(1, COUNT + 1):
        made = np.random.default_rng(place)
        layers = {
            name: LowRank(
                made.standard_normal((shape.inputs, RANK), np.float32),
                made.standard_normal((RANK, shape.outputs), np.float32),
            )
            for name, shape in found.places.shapes.items()
        }
        found._store.put(place, layers)
    layer = next(module for module in model.modules() if hasattr(module, "_decode_core"))
    hidden = layer.o_proj.weight.shape[0]
    x = mx.random.normal((1, 1, hidden), key=mx.random.key(1))
    conv = mx.zeros((1, layer.conv_kernel - 1, 3 * layer.projection_dim))
    state = mx.zeros((1, layer.num_heads, layer.head_dim, layer.head_dim))
    # As the layer does if there is Metal.
    step = mx.compile(layer._decode_core) if layer._step is None else layer._step
    outputs = []
    for place in range(COUNT + 1):
        with applied([place]):
            outputs.append(step(x, conv, state)[0])
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert mx.max(mx.abs(outputs[a] - outputs[b])).item() > 1e-3, (a, b)
