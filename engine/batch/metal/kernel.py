"""Kernels of the device: Metal's or CUDA's, from the same bodies."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import mlx.core as mx

from engine.batch.metal import bodies

VARIABLE = "MLX_LM_SERVER_KERNELS"
"""Environment variable: ``0`` leaves attention to MLX's kernels."""

Argument: TypeAlias = tuple[str, int | bool | mx.Dtype]
Size: TypeAlias = tuple[int, int, int]


class Source(NamedTuple):
    """A kernel's text and the names in it."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    body: str
    header: str = ""


class Kernel(Protocol):
    """As returned by `mx.fast.metal_kernel`."""

    def __call__(
        self,
        *,
        inputs: Sequence[mx.array],
        template: Sequence[Argument],
        grid: Size,
        threadgroup: Size,
        output_shapes: Sequence[tuple[int, ...]],
        output_dtypes: Sequence[mx.Dtype],
    ) -> list[mx.array]: ...


ATTEND = Source(
    "paged_attend",
    ("queries", "pool", "table", "spans", "limits", "factors"),
    ("sums", "tops"),
    bodies.ATTEND,
    bodies.HEADER,
)
JOIN = Source("paged_join", ("sums", "tops", "sinks"), ("out",), bodies.JOIN)
GATHER = Source(
    "paged_gather",
    ("pool", "table", "ends", "limits"),
    ("keys", "values"),
    bodies.GATHER,
    bodies.HEADER,
)
ROUND = Source("paged_round", ("keys", "values"), ("words",), bodies.ROUND, bodies.ROUND_HEADER)
SOURCES = (ATTEND, JOIN, GATHER, ROUND)


def why_not() -> str:
    """Return why this process has no kernels; empty if it has some."""
    if os.environ.get(VARIABLE) == "0":
        return f"{VARIABLE} is 0"
    if not (mx.metal.is_available() or mx.cuda.is_available()):
        return "no GPU"
    return ""


def make(source: Source) -> Kernel:
    """Return the kernel. It is compiled in its first call with each combination of template
    arguments. Tests put an emulator in the place of this function."""
    given: dict[str, Any] = {
        "name": source.name,
        "input_names": source.inputs,
        "output_names": source.outputs,
        "source": source.body,
    }
    kernel: Kernel
    if mx.metal.is_available():
        kernel = mx.fast.metal_kernel(**given, header=source.header)
    else:
        kernel = mx.fast.cuda_kernel(**given, header=bodies.CUDA + source.header)
    return kernel
