"""Quantization of keys and values in MLX and in NumPy."""

import itertools

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from engine.cache.quantization import (
    MIDDLE,
    UNQUANTIZED,
    Precision,
    Quantization,
    Quantized,
    codes_of,
    dequantize,
    pack,
    quantize,
    unpack,
)
from engine.cpu.pages.rounding import round_in_place, values_of

WAYS = [Quantization(bits, size) for bits in (8, 4) for size in (16, 32, 64, 128)]
KERNEL_GROUPS = (32, 64, 128)
"""Group sizes with MLX kernels."""
SPREADS = (1e-30, 1e-8, 1e-6, 1e-3, 1.0, 100.0, 1e4, 6e4, 1e5, 1e7, 1e30)
OFFSETS = (0.0, 1.0, -1.0, 300.0, -300.0)


@pytest.fixture(params=WAYS, ids=str)
def how(request: pytest.FixtureRequest) -> Quantization:
    return request.param


def made_up() -> NDArray[np.float32]:
    """Return (many, 128): all sizes, one-sided and constant groups, single large elements."""
    random = np.random.default_rng(0)
    rows = []
    for spread in SPREADS:
        for offset in OFFSETS:
            part = (random.standard_normal((6, 128)) + offset) * spread
            part[0] = offset * spread
            part[1, 5] = 1000 * spread
            part[2] = np.abs(part[2])
            rows.append(part)
    return np.concatenate(rows).astype(np.float32)


def quantized(x: NDArray[np.float32], how: Quantization) -> Quantized:
    return quantize(mx.array(x), how)


def test_numpy_rounds_to_the_same_numbers_as_mlx(how: Quantization) -> None:
    x = made_up()
    expected = quantized(x, how)
    packed = np.array(pack(expected.codes, how.bits))
    codes, scales = round_in_place(x, how)
    assert np.array_equal(scales, np.array(expected.scales)[: how.scales])
    assert np.array_equal(codes, (packed - MIDDLE).view(np.int8) if how.is_symmetric else packed)
    assert np.array_equal(x, np.array(dequantize(expected, how)))
    assert np.isfinite(x).all()
    read = np.empty_like(x)
    values_of(codes, scales, how, read)
    assert read.tobytes() == x.tobytes()  # which -0 and 0 are not


def test_rounding_of_a_row_does_not_depend_on_other_rows(how: Quantization) -> None:
    """It is the same bit for bit in every batch, width and place."""
    random = np.random.default_rng(2)
    rows = random.standard_normal((5, 3, 90, 128)).astype(np.float32)
    rows[1], rows[2, :, ::3] = 0, np.abs(rows[2, :, ::3])
    together = rows.copy()
    codes, scales = round_in_place(together, how)
    in_mlx = quantized(rows, how)
    read = np.array(dequantize(in_mlx, how))
    for row, position in itertools.product(range(5), (0, 1, 44, 89)):
        place = slice(row, row + 1), slice(None), slice(position, position + 1)
        alone = rows[place].copy()
        its_codes, its_scales = round_in_place(alone, how)
        assert alone.tobytes() == together[place].tobytes() == read[place].tobytes()
        assert its_codes.tobytes() == codes[place].tobytes()
        assert its_scales.tobytes() == scales[:, *place].tobytes()
        one = quantized(rows[place], how)
        assert mx.array_equal(one.codes, in_mlx.codes[place])
        assert mx.array_equal(one.scales, in_mlx.scales[:, *place])


def test_zero_stays_zero_with_8_bits_and_both_signs_have_the_same_values() -> None:
    how, x = Quantization(8, 32), made_up()
    x[:, ::7] = 0
    other = -x
    round_in_place(x, how)
    round_in_place(other, how)
    assert not np.signbit(x[:, ::7]).any() and not x[:, ::7].any()
    assert np.array_equal(x, -other)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_codes_recovered_from_16_bits_give_the_same_values_again(
    how: Quantization, dtype: mx.Dtype
) -> None:
    """With offsets and spreads at which steps of the codes are about those of the type."""
    random = np.random.default_rng(2)
    spread = np.exp2(random.uniform(-9, 3, (20_000, 1)))
    x = random.uniform(-1, 1, (20_000, how.group_size)) * spread
    x += (
        random.choice([0, 1, -1, 2, 1.01], (20_000, 1))
        + random.choice([0, 1], spread.shape) * spread
    )
    codes, scales = quantize(mx.array(x.astype(np.float32)).astype(dtype), how)
    kept = dequantize(Quantized(codes, scales), how).astype(dtype)
    again = Quantized(codes_of(kept, scales, how), scales)
    assert mx.array_equal(dequantize(again, how).astype(dtype), kept)


def test_codes_are_recovered_from_dequantized_values(how: Quantization) -> None:
    codes, scales = quantized(made_up(), how)
    values = dequantize(Quantized(codes, scales), how)
    assert mx.array_equal(codes_of(values, scales, how), codes)


def test_every_code_is_recovered_for_every_possible_scale_and_bias(how: Quantization) -> None:
    """Scales are drawn, not made from numbers, with biases up to the largest for a scale."""
    random = np.random.default_rng(1)
    codes = random.integers(0, how.max_code + 1, (2000, how.group_size), np.uint8)
    scale = np.exp2(random.uniform(-24, 15, (2000, 1))).astype(np.float16)
    most = np.minimum(scale.astype(np.float32) * 2.0**20, 65_000)
    bias = (random.uniform(-1, 1, (2000, 1)) * most).astype(np.float16)
    scales = np.stack([scale, bias])
    values = codes * scale.astype(np.float32) + bias.astype(np.float32)
    assert np.array_equal(np.array(codes_of(mx.array(values), mx.array(scales), how)), codes)


def test_a_scale_is_never_so_small_that_its_bias_hides_the_codes(how: Quantization) -> None:
    scale, bias = np.array(quantized(made_up(), how).scales).astype(np.float32)
    assert (scale > 0).all() and (np.abs(bias) < 2.0**20 * scale).all()


def test_the_error_is_at_most_half_a_step(how: Quantization) -> None:
    x = made_up()
    x = x[np.abs(x).max(axis=-1) < 60_000]
    codes, scales = quantized(x, how)
    step = np.repeat(np.array(scales[0]).astype(np.float32), how.group_size, axis=-1)
    error = np.abs(np.array(dequantize(Quantized(codes, scales), how)) - x)
    assert (error <= 0.5 * step + 1e-6 * np.abs(x)).all()
    groups = x.reshape(len(x), -1, how.group_size)
    largest = np.abs(groups).max(axis=-1)
    width = 2 * largest if how.bits == 8 else np.ptp(groups, axis=-1) + 2 * largest * 2.0**-10
    assert (np.array(scales[0]) <= width / (how.max_code - 1) * 1.003 + 2.0**-22).all()


@pytest.mark.parametrize("how", [how for how in WAYS if how.group_size in KERNEL_GROUPS])
def test_packed_codes_are_those_of_mlx(how: Quantization) -> None:
    codes, scales = quantized(made_up(), how)
    wide = scales.astype(mx.float32)
    packed = pack(codes, how.bits)
    assert packed.nbytes == len(codes) * how.code_bytes(128)
    read = mx.dequantize(
        packed.view(mx.uint32), wide[0], wide[1], group_size=how.group_size, bits=how.bits
    )
    assert mx.array_equal(read, dequantize(Quantized(codes, scales), how))
    assert mx.array_equal(unpack(packed, how.bits), codes)


def test_nan_stays_nan_and_spoils_only_its_group() -> None:
    x = made_up()[:4]
    x[0, 3], x[1, 70] = np.nan, np.nan
    how = Quantization(8, 64)
    round_in_place(x, how)
    spoiled = np.isnan(x).reshape(4, 2, 64)
    assert spoiled[0, 0].all() and spoiled[1, 1].all() and spoiled.sum() == 128


@pytest.mark.parametrize(
    ("dim", "size"),
    [(64, 64), (128, 64), (192, 64), (96, 32), (80, 16), (576, 64), (16, 16), (24, 0), (0, 0)],
)
def test_the_group_size_shrinks_until_it_divides_the_dim(dim: int, size: int) -> None:
    """If none does, nothing is quantized."""
    assert Precision(8, 64).for_dim(dim) == (Quantization(8, size) if size else None)
    assert UNQUANTIZED.for_dim(dim) is None


def test_bytes_of_a_head_of_64() -> None:
    hows = [Precision(bits, 64).for_dim(64) for bits in (8, 4)]
    assert [how and how.code_bytes(64) + how.scale_bytes(64) for how in hows] == [66, 36]
