import itertools

import mlx.core as mx
import pytest
from mlx import nn

from engine.batch.cpu import matmuls


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(48, 80, bias=True)
        self.embed = nn.Embedding(100, 48)


@pytest.mark.parametrize("fastest", range(2 * len(matmuls.ROWS)))
def test_every_way_gives_the_same_product(fastest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Times are given: one way with one number of rows is faster than all others."""
    times = (0.0 if number == fastest else 1.0 for number in itertools.count())
    monkeypatch.setattr(matmuls, "shortest_s", lambda work, long_s: next(times))
    model, fast = nn.Linear(48, 80, bias=False), matmuls.Matmuls()
    fast.measure(model)
    for rows in (*range(1, 20), 32, 100, 128):
        x = mx.random.normal((rows, 48), key=mx.random.key(rows))
        product = fast(x, model.weight)
        assert mx.allclose(product, x @ model.weight.T, rtol=1e-4, atol=1e-4)


def test_measured_layers_multiply_as_before_whatever_the_shape(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, fast = Two(), matmuls.Matmuls()
    shapes = ((48,), (1, 48), (2, 5, 48), (100, 48), (300, 48))
    inputs = [mx.random.normal(shape) for shape in shapes]
    before = [(model.first(x), model.embed.as_linear(x)) for x in inputs]
    fast.measure(model)
    monkeypatch.setattr(nn.Linear, "__call__", nn.Linear.__call__)
    monkeypatch.setattr(nn.Embedding, "as_linear", nn.Embedding.as_linear)
    matmuls.install(fast)
    for x, (linear, tied) in zip(inputs, before, strict=True):
        assert mx.allclose(model.first(x), linear, rtol=1e-4, atol=1e-4)
        assert mx.allclose(model.embed.as_linear(x), tied, rtol=1e-4, atol=1e-4)
