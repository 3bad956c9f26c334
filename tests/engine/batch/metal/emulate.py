"""`mx.fast.metal_kernel` on any machine: the body of a kernel is compiled as C++ (shim.h).

The signature is generated as MLX does (mlx/backend/common/metal_kernel.cpp): inputs, their shapes
if the text mentions them, outputs, attributes, template arguments."""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np

from engine.batch.metal.kernel import Argument, Size, Source

SHIM = Path(__file__).with_name("shim.h")
COMPILER = shutil.which("g++")
FLAGS = (
    *("-std=c++20", "-O1", "-fPIC", "-Wall", "-Wno-unused", "-ffp-contract=off"),
    *("-fsanitize=undefined,bounds", "-fno-sanitize-recover=all", "-static-libubsan"),
)
TYPES = {
    mx.float32: "float",
    mx.float16: "float16_t",
    mx.bfloat16: "bfloat16_t",
    mx.uint32: "uint",
    mx.int32: "int",
}
ATTRIBUTES = {
    "threadgroup_position_in_grid": ("uint3", "group"),
    "thread_position_in_grid": ("uint3", "in_grid"),
    "thread_index_in_simdgroup": ("uint", "lane"),
    "simdgroup_index_in_threadgroup": ("uint", "simd"),
    "simdgroups_per_threadgroup": ("uint", "simds"),
}


class CompilerError(Exception):
    """The text does not compile. The message is the compiler's."""


class EmulatorError(Exception):
    """A kernel did what has no defined result on a GPU."""


class Emulated:
    """A kernel. It runs when it is called, on arrays that MLX evaluates before."""

    def __init__(self, source: Source, folder: Path, seed: int = 0) -> None:
        """Compiled kernels are kept in ``folder``. The order of threads depends on ``seed``."""
        self.source, self.seed, self.calls = source, seed, 0
        self._folder = folder
        self._built: dict[str, Callable[..., bytes | None]] = {}

    def __call__(
        self,
        *,
        inputs: Sequence[mx.array],
        template: Sequence[Argument],
        grid: Size,
        threadgroup: Size,
        output_shapes: Sequence[tuple[int, ...]],
        output_dtypes: Sequence[mx.Dtype],
    ) -> list[mx.array]:
        self.calls += 1
        run = self._function(self.signature(inputs, template, output_dtypes))
        arrays = [_to_host(array) for array in inputs]
        for shape, dtype in zip(output_shapes, output_dtypes, strict=True):
            out = np.empty(shape, np.uint16 if dtype.size == 2 else np.uint32)
            out.view(np.uint8)[...] = 0xFF  # NaN, so that what is not written shows
            arrays.append(out)
        pointers = (ctypes.c_void_p * len(arrays))(*[array.ctypes.data for array in arrays])
        sizes = (ctypes.c_size_t * len(arrays))(*[array.nbytes for array in arrays])
        shapes = [(ctypes.c_int * max(1, array.ndim))(*array.shape) for array in inputs]
        of_shapes = (ctypes.c_void_p * len(shapes))(*map(ctypes.addressof, shapes))
        where = (ctypes.c_uint * 6)(*grid, *threadgroup)
        wrong = run(pointers, sizes, of_shapes, where, ctypes.c_uint64(self.seed))
        if wrong is not None:
            raise EmulatorError(wrong.decode())
        outputs = arrays[len(inputs) :]
        return [
            mx.array(out).view(dtype) for out, dtype in zip(outputs, output_dtypes, strict=True)
        ]

    def signature(
        self,
        inputs: Sequence[mx.array],
        template: Sequence[Argument],
        output_dtypes: Sequence[mx.Dtype],
    ) -> tuple[list[tuple[str, str]], list[tuple[str, str]], list[str]]:
        """Return the template's parameters and the function's (type, name), and the values of the
        former."""
        body = self.source.body
        params = []
        for name, array in zip(self.source.inputs, inputs, strict=True):
            params.append((f"const {TYPES[array.dtype]}*", name))
            if f"{name}_shape" in body:
                params.append(("const int*", f"{name}_shape"))
        for name, dtype in zip(self.source.outputs, output_dtypes, strict=True):
            params.append((f"{TYPES[dtype]}*", name))
        params += [(kind, name) for name, (kind, _) in ATTRIBUTES.items() if name in body]
        declared, given = [], []
        for name, value in template:
            if isinstance(value, bool):
                declared.append(("bool", name))
                given.append(str(value).lower())
            elif isinstance(value, int):
                declared.append(("int", name))
                given.append(str(value))
            else:
                declared.append(("typename", name))
                given.append(TYPES[value])
        return declared, params, given

    def _function(
        self, signature: tuple[list[tuple[str, str]], list[tuple[str, str]], list[str]]
    ) -> Callable[..., bytes | None]:
        code = self._text(*signature)
        key = hashlib.sha256(code.encode() + SHIM.read_bytes()).hexdigest()[:24]
        if key not in self._built:
            target = self._folder / f"{self.source.name}_{key}.so"
            if not target.exists():
                _compile(code, target)
            self._built[key] = run = ctypes.CDLL(str(target)).run
            run.restype = ctypes.c_char_p
        return self._built[key]

    def _text(
        self, declared: list[tuple[str, str]], params: list[tuple[str, str]], given: list[str]
    ) -> str:
        passed, arrays, inputs = [], 0, len(self.source.inputs)
        for kind, name in params:
            if name in ATTRIBUTES:
                passed.append(f"emu::now->{ATTRIBUTES[name][1]}")
            elif name.endswith("_shape"):
                passed.append(f"({kind})shapes[{self.source.inputs.index(name[:-6])}]")
            else:
                passed.append(f"({kind})p[{arrays}]")
                arrays += 1

        def listed(pairs: list[tuple[str, str]]) -> str:
            return ", ".join(f"{kind} {name}" for kind, name in pairs)

        return (
            f'#include "{SHIM.name}"\n{self.source.header}\n'
            f"template <{listed(declared)}>\n"
            f"void kernel({listed(params)}) {{\n{self.source.body}\n}}\n"
            'extern "C" const char* run(void** arrays, const size_t* sizes, void** shapes, '
            "const uint* grid, uint64_t seed) {\n"
            f"  return emu::run(arrays, sizes, {inputs}, {arrays}, grid, seed, [&](void** p) {{\n"
            f"    kernel<{', '.join(given)}>({', '.join(passed)});\n  }});\n}}\n"
        )


def _compile(code: str, target: Path) -> None:
    """Raises: CompilerError."""
    own = target.parent / hashlib.sha256(SHIM.read_bytes()).hexdigest()[:16]
    header = own / SHIM.name
    if not header.with_suffix(".h.gch").exists():  # compiled in advance, it takes a third
        own.mkdir(exist_ok=True)
        header.write_bytes(SHIM.read_bytes())
        _run_compiler("-x", "c++-header", str(header), "-o", f"{header}.gch")
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        source, built = Path(scratch) / "kernel.cpp", Path(scratch) / "kernel.so"
        source.write_text(code)
        _run_compiler("-shared", f"-I{own}", "-o", str(built), str(source))
        built.replace(target)


def _run_compiler(*arguments: str) -> None:
    assert COMPILER is not None
    done = subprocess.run([COMPILER, *FLAGS, *arguments], capture_output=True, text=True)
    if done.returncode:
        raise CompilerError(done.stderr[:4000])


def _to_host(array: mx.array) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
    """Return the elements of ``array``, row by row."""
    whole = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
    return np.ascontiguousarray(np.array(whole))
