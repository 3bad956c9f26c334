"""Decode steps of a random model with the shape and size of Qwen3-4B and 4-bit codes, on a CPU.

Its layers are not proven, which would take longer than the benchmark."""

from __future__ import annotations

import ctypes
import gc
import json
import math
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bench.side import OurSide, answer, side
from engine.model.load import resolve

CONTEXT_TOKENS, STEPS, STOCK_LAYERS = 200, 6, 2
GROUP, BITS, MAX_TOKENS = 64, 4, 4096
KINDS = "resident", "allocated"
SHAPE: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": MAX_TOKENS,
    "tie_word_embeddings": True,
    "quantization": {"group_size": GROUP, "bits": BITS},
}


def large(model: str, runs: int) -> None:
    """Print steps beside reading the checkpoint once, the process's memory, and MLX's products.

    The tokenizer is always the demo's."""
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        size = _write(Path(scratch))
        print(f"checkpoint of {size / 1e9:.2f} GB", flush=True)
        with side("ours", scratch, "fast", "bench.engine.large") as one:
            resident, allocated = (one.call(f"{kind}_bytes") / size for kind in KINDS)
            for rows in (1, 8):
                times = [
                    (one.call("decode", [CONTEXT_TOKENS] * rows, STEPS), one.call("read"))
                    for _ in range(2 * runs)
                ]
                step, reading = (min(each) for each in zip(*times, strict=True))
                print(
                    f"{rows} rows: {1e3 * step:.0f} ms, reading the checkpoint "
                    f"{1e3 * reading:.0f} ms: {step / reading:.2f} times",
                    flush=True,
                )
            print(
                f"memory of the process: {resident:.2f} times the checkpoint; "
                f"allocated since before the model was loaded: {allocated:.2f}"
            )
            stock = one.call("stock_layers") * SHAPE["num_hidden_layers"] / STOCK_LAYERS
            print(f"products of all layers in MLX, 1 row: {1e3 * stock:.0f} ms")


class LargeSide(OurSide):
    """A model whose layers are computed here without a proof."""

    def __init__(self, path: str) -> None:
        from engine.backend import allocation
        from engine.batch import device
        from engine.cache.layout import probe_layout
        from engine.executor.batched import BatchedExecutor
        from engine.model.load import load

        device.prepare()
        self._path = Path(path)
        self._before = _allocated_bytes()
        loaded = load(self._path)
        model = loaded.model
        layers = device.tune(model, "fast", 1 << 40)
        layout = probe_layout(model)
        kind = device.batch_classes(model, layout)[0]
        assert layers is not None and not kind.runs_model
        layers.drop()
        kind.release_weights(loaded.weight_files)
        allocation.give_back()
        self._executor = BatchedExecutor(model, layout, 16, kind)
        self._as_weights = None

    def resident_bytes(self) -> float:
        """Return the resident memory of the process in bytes."""
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * 4096

    def allocated_bytes(self) -> float:
        """Return the heap bytes in use since before the model was loaded. The heap keeps more
        for reuse. NaN on systems other than Linux."""
        return _allocated_bytes() - self._before

    def stock_layers(self) -> float:
        """Return the seconds of MLX's own products of some layers, one row each."""
        import mlx.core as mx

        weights: Any = mx.load(str(self._path / "model.safetensors"))
        names = [name for name in weights if name.endswith(".scales") and ".layers." in name]
        chosen = [name[:-7] for name in names if int(name.split(".")[2]) < STOCK_LAYERS]
        given = [
            [weights[f"{name}.{part}"] for part in ("weight", "scales", "biases")]
            for name in chosen
        ]
        rows = [
            mx.random.normal((1, w.shape[1] * 32 // BITS)).astype(mx.bfloat16) for w, *_ in given
        ]
        mx.eval(given, rows)
        seconds = []
        for _ in range(3):
            begun = time.perf_counter()
            mx.eval(
                [
                    mx.quantized_matmul(x, *each, transpose=True, group_size=GROUP, bits=BITS)
                    for x, each in zip(rows, given, strict=True)
                ]
            )
            seconds.append(time.perf_counter() - begun)
        return min(seconds)


def _allocated_bytes() -> float:
    """Return the bytes of all allocations of the C library."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2"):
        return math.nan
    library.mallinfo2.restype = _MallInfo
    found = library.mallinfo2()
    return float(found.uordblks + found.hblkhd)


class _MallInfo(ctypes.Structure):
    """glibc's struct mallinfo2: ``uordblks`` are heap bytes in use, ``hblkhd`` bytes of separate
    mappings."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def _write(path: Path) -> int:
    """Write the checkpoint into ``path``; return its bytes."""
    import mlx.core as mx

    rng = np.random.default_rng(0)
    arrays = {}
    for name, out, width in _matrices():
        codes = rng.integers(0, 1 << 32, (out, width * BITS // 32), np.uint32)
        arrays[f"{name}.weight"] = mx.array(codes)
        scales = mx.full((out, width // GROUP), 0.1 * width**-0.5, mx.bfloat16)
        arrays[f"{name}.scales"], arrays[f"{name}.biases"] = scales, -7.5 * scales
    for name, width in _norms():
        arrays[f"{name}.weight"] = mx.ones((width,), mx.bfloat16)
    file = path / "model.safetensors"
    mx.save_safetensors(str(file), arrays, metadata={"format": "mlx"})
    (path / "config.json").write_text(json.dumps(SHAPE))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(resolve("demo-4bit") / name, path / name)
    return file.stat().st_size


def _matrices() -> Iterator[tuple[str, int, int]]:
    """Yield the name, rows and columns of each."""
    hidden, inner, dim = SHAPE["hidden_size"], SHAPE["intermediate_size"], SHAPE["head_dim"]
    queries, keys = SHAPE["num_attention_heads"] * dim, SHAPE["num_key_value_heads"] * dim
    yield "model.embed_tokens", SHAPE["vocab_size"], hidden
    for layer in range(SHAPE["num_hidden_layers"]):
        start = f"model.layers.{layer}"
        yield f"{start}.self_attn.q_proj", queries, hidden
        yield f"{start}.self_attn.k_proj", keys, hidden
        yield f"{start}.self_attn.v_proj", keys, hidden
        yield f"{start}.self_attn.o_proj", hidden, queries
        yield f"{start}.mlp.gate_proj", inner, hidden
        yield f"{start}.mlp.up_proj", inner, hidden
        yield f"{start}.mlp.down_proj", hidden, inner


def _norms() -> Iterator[tuple[str, int]]:
    yield "model.norm", SHAPE["hidden_size"]
    for layer in range(SHAPE["num_hidden_layers"]):
        start = f"model.layers.{layer}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{start}.{name}", SHAPE["hidden_size"]
        for name in ("self_attn.q_norm", "self_attn.k_norm"):
            yield f"{start}.{name}", SHAPE["head_dim"]


if __name__ == "__main__":
    answer(lambda: LargeSide(sys.argv[2]))
