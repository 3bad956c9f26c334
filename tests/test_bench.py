"""The comparisons that need no servers, on a tiny model."""

import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from bench.primitives import count_primitives, fused_functions
from bench.side import SIDES, side
from tests.tiny_models import make_tiny


@pytest.mark.parametrize("name", SIDES)
def test_a_side_answers_each_call_with_seconds(name: str, tmp_path: Path) -> None:
    make_tiny("llama", tmp_path)
    with side(name, str(tmp_path)) as one:
        assert one.call("prefill", 32, 16) > 0
        assert one.call("decode", [20, 20], 2) > 0
        assert one.call("generate", [40, 7], 2) > 0


def test_primitives_are_counted_without_views_and_without_what_was_evaluated() -> None:
    a, b = mx.zeros((4, 4)), mx.ones((4, 4)) * 2
    mx.eval(a, b)
    c = (a @ b).T[:2].reshape(4, 2) @ b[:2] + a
    assert count_primitives([c]) == {"Matmul": 2, "Add": 1}
    mx.eval(c)
    assert count_primitives([c, a]) == {}


def test_one_primitive_stands_for_each_fused_function() -> None:
    x, weight = mx.zeros((1, 4, 3, 8)), mx.ones(8)
    offsets = mx.array([5])
    mx.eval(x, weight, offsets)
    with fused_functions():
        normed = mx.fast.rms_norm(x, weight, 1e-5)
        turned = mx.fast.rope(normed, 8, traditional=False, base=1e4, scale=1.0, offset=offsets)
        mask = mx.array([True, True, False])
        out = mx.fast.scaled_dot_product_attention(
            turned, x[:, :2] + 1, x[:, :2, :, :4], scale=1.0, mask=mask
        )
    assert out.shape == (1, 4, 3, 4)
    assert count_primitives([out]).total() == 4
    normed = mx.fast.rms_norm(x, weight, 1e-5)
    assert count_primitives([normed]).total() > 1 or mx.default_device() == mx.gpu


_COUNTS = """
import sys
import mlx_lm
from bench import kernels
from engine.batch import ragged
from engine.cache.layout import probe_layout

ragged.install()
model = mlx_lm.load(sys.argv[1])[0]
layout = probe_layout(model)
builds = [kernels.theirs(model, layout, [40, 9], 1)]
builds += [kernels.ours(model, layout, [40, 9], 1, bits) for bits in (16, 8)]
print(*(cost.per_layer for cost in kernels.measure(builds, 2, 1)))
"""


def test_a_step_of_ours_is_counted_beside_that_of_mlx_lm(tmp_path: Path) -> None:
    """In a process of its own: other tests put operations for CPUs in the place of mlx-lm's."""
    command = [sys.executable, "-c", _COUNTS, str(make_tiny("llama", tmp_path))]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=200)
    theirs, ours, quantized = map(float, ended.stdout.split())
    # Norms and projections, rope, writes, attention, the gate: 17 a layer and the rest.
    assert 17 < theirs < 24
    assert 17 < ours <= 1.15 * theirs and quantized <= 1.4 * theirs
