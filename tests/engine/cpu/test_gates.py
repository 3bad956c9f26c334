import mlx.core as mx
import pytest
from mlx import nn

from engine.cpu import gates


@pytest.mark.parametrize("rows", [1, 7, 300])
def test_swiglu_is_mlx_lms_to_rounding_also_far_from_zero(rows: int) -> None:
    gate = mx.random.normal((2, rows, 96), key=mx.random.key(1)) * 30
    gate[0, 0, 0], gate[0, 0, 1] = -500.0, 500.0
    x = mx.random.normal((2, rows, 96), key=mx.random.key(2))
    assert mx.allclose(gates.swiglu(gate, x), nn.silu(gate) * x, rtol=1e-5, atol=1e-6)


def test_other_types_are_left_to_mlx() -> None:
    gate = mx.random.normal((100, 100)).astype(mx.float16)
    assert gates.swiglu(gate, gate).dtype == mx.float16
