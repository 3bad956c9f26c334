"""Layers of towers outside of MLX: its results, or its own call where something is not known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn

from engine.cpu.onnx import graphs
from engine.cpu.onnx.graphs import Graph
from engine.cpu.towers import HostLayers, _Trace
from tests.engine.conftest import Wrap

pytestmark = pytest.mark.skipif(bool(graphs.unusable()), reason=graphs.unusable())

WIDTH = 16


class Layer(nn.Module):
    """A block of a transformer, followed by ``last``."""

    def __init__(self, last: Callable[..., Any] = lambda x, *_: x) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), nn.MultiHeadAttention(WIDTH, 2, bias=True)
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH, bias=False)
        self.last = last

    def __call__(self, x: mx.array, *others: Any, mask: Any = None) -> Any:
        seen = self.norm(x)
        seen = mx.pad(seen, [(0, 0), (1, 0), (0, 0)])[:, 1:]
        x = x + self.attention(seen, seen, seen, mask=mask)
        return self.last(x + self.down(nn.gelu(self.up(x))), *others)


def rows(seed: int, count: int = 5) -> mx.array:
    return mx.random.normal((1, count, WIDTH), key=mx.random.key(seed))


def assert_same(found: mx.array, expected: mx.array) -> None:
    assert np.abs(np.array(found) - np.array(expected)).max() < 1e-5


def test_layers_have_mlx_results_and_share_what_does_not_depend_on_weights() -> None:
    host, layers = HostLayers(), [Layer(), Layer()]
    for count in (5, 7):
        mask = mx.triu(mx.full((count, count), -1e9), 1)
        for layer in layers:
            for seed in (1, 2):
                x = rows(seed, count)
                found = host.call(layer, (x,), {"mask": mask})
                assert_same(found, layer(x, mask=mask))
    assert not host.refused
    assert host.sessions == 2


def test_what_nothing_uses_is_not_computed() -> None:
    graph = Graph()
    x = graph.input("x", 2, 3)
    graph.node("Gather", x, graph.integers(7), axis=0)  # would raise
    graph.output(graph.node("Add", x, x), 2, 3)
    graph.drop_unused()
    given = np.ones((2, 3), np.float32)
    assert graph.session()(given)[0].tolist() == (given + given).tolist()


def test_a_value_that_code_reads_is_part_of_what_was_traced() -> None:
    host = HostLayers()
    layer = Layer(lambda x, at: mx.concatenate(mx.split(x, at.tolist(), 1)[::-1], 1))
    for at in (1, 3):
        given = rows(1), mx.array([at])
        assert_same(host.call(layer, given, {}), layer(*given))
    assert not host.refused


@pytest.mark.parametrize(
    "last",
    [
        lambda x: mx.sort(x, axis=-1),  # no operator
        lambda x: x * float(x.sum().item()),  # reads what is traced
        lambda x: x.astype(mx.bfloat16),
    ],
)
def test_other_layers_stay_with_mlx(last: Callable[..., Any]) -> None:
    host, layer = HostLayers(), Layer(last)
    for seed in (1, 2):
        x = rows(seed)
        assert mx.array_equal(host.call(layer, (x,), {}), layer(x))
    assert host.refused == {Layer}


def test_a_layer_with_several_results_stays_with_mlx() -> None:
    several: tuple[Callable[..., Any], ...] = (lambda x: (x, 2 * x)), (lambda x: (x,))
    for last in several:
        host, layer, x = HostLayers(), Layer(last), rows(1)
        found, expected = host.call(layer, (x,), {}), layer(x)
        assert isinstance(found, tuple) and all(map(mx.array_equal, found, expected))


def test_a_layer_with_arguments_of_unknown_kinds_stays_with_mlx() -> None:
    host, layer, x = HostLayers(), Layer(lambda x, by: x * by["factor"]), rows(1)
    for factor in (1.0, 2.0):
        given = x, {"factor": mx.array(factor)}
        assert mx.array_equal(host.call(layer, given, {}), layer(*given))
    assert host.refused == {Layer}


def test_the_sizes_that_were_used_last_keep_their_graphs(
    monkeypatch: pytest.MonkeyPatch, wrap: Wrap
) -> None:
    made: list[str] = []

    @wrap(_Trace, "session")
    def noted(build: Any, trace: Any) -> Any:
        made.append("a graph")
        return build(trace)

    monkeypatch.setattr("engine.cpu.towers.MAX_SESSIONS", 2)
    host, layers = HostLayers(), [Layer(), Layer()]
    for count, graphs_made in ((5, 1), (6, 2), (5, 2), (7, 3), (5, 3), (6, 4)):
        for layer in layers:
            x = rows(1, count)
            assert_same(host.call(layer, (x,), {}), layer(x))
        assert (host.sessions, len(made)) == (min(2, graphs_made), graphs_made)


def test_a_layer_whose_results_differ_from_the_traced_ones_stays_with_mlx() -> None:
    calls: list[int] = []

    def count(x: mx.array) -> mx.array:
        calls.append(1)
        return x * len(calls)

    host, x = HostLayers(), rows(1)
    host.call(Layer(count), (x,), {})
    assert not host.refused and not host.sessions
