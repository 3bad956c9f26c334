import mlx.core as mx
import pytest
from mlx import nn

from engine.batch.cpu import matmuls


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(48, 80, bias=True)
        self.embed = nn.Embedding(100, 48)


def test_every_way_gives_the_same_product() -> None:
    weight = mx.random.normal((80, 48), key=mx.random.key(1))
    fast = matmuls.Matmuls()
    for rows in range(1, 20):
        x = mx.random.normal((rows, 48), key=mx.random.key(rows))
        for padded in (rows, rows + 3):
            for way in (matmuls._plain, matmuls._turned):
                fast._choices[80, 48] = {rows: matmuls._Choice(padded, way)}
                assert mx.allclose(fast(x, weight), x @ weight.T, rtol=1e-4, atol=1e-4)


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
