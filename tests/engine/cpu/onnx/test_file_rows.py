"""Embeddings that are looked up in the files of their checkpoint."""

import os
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn

from engine.cpu.onnx.weights import Embedding, weight_of
from engine.model.errors import FilesChanged

KINDS = [("affine", bits, 64) for bits in (2, 3, 4, 5, 6, 8)]
KINDS += [("mxfp4", 4, 32), ("nvfp4", 4, 16), ("mxfp8", 8, 32)]
DTYPES = (mx.float32, mx.bfloat16, mx.float16)
CASES = [(*kind, DTYPES[i % 3], False) for i, kind in enumerate(KINDS)]
CASES += [(*kind, DTYPES[i // 2], True) for i, kind in enumerate(KINDS) if kind[0] == "affine"]
ROWS, WIDTH = 5000, 128
CHOSEN = np.array([0, 4999, 3, 3, 4096])


def embedding(seed: int = 0) -> Any:
    mx.random.seed(seed)
    made = nn.Embedding(ROWS, WIDTH)
    made.weight = mx.random.normal((ROWS, WIDTH))
    return made


def saved(path: Path, module: Any, **others: mx.array) -> list[Path]:
    """Write the arrays of ``module`` under names of the file's own. Return all files."""
    files = [path / "model-1.safetensors", path / "model-2.safetensors"]
    mx.save_safetensors(str(files[0]), {"other": mx.zeros((3, 3)), **others})
    arrays = {f"its.{name}": array for name, array in module.parameters().items()}
    mx.save_safetensors(str(files[1]), arrays, metadata={"format": "mlx"})
    return files


def in_files(files: list[Path], module: Any) -> Embedding:
    """Return the embedding ``module`` after it was looked for in ``files``."""
    found = Embedding(module)
    found.read_from(files)
    return found


@pytest.mark.parametrize(("mode", "bits", "group", "dtype", "widened"), CASES)
def test_rows_are_those_of_the_embedding_in_memory(
    mode: str, bits: int, group: int, dtype: Any, widened: bool, tmp_path: Path
) -> None:
    plain = embedding()
    plain.weight = plain.weight.astype(dtype)
    module = plain.to_quantized(group_size=group, bits=bits, mode=mode)
    files = saved(tmp_path, module)
    if widened:  # as they are in a model that is computed in fp32
        module.scales, module.biases = (
            array.astype(mx.float32) for array in (module.scales, module.biases)
        )
    expected = weight_of(module).gather(CHOSEN)
    found = in_files(files, module)
    assert found.weight is None and not module.parameters()
    assert np.array_equal(found.gather(CHOSEN), expected) and expected.dtype == np.float32


@pytest.mark.parametrize("dtype", DTYPES)
def test_dense_rows_are_found_among_others_of_their_shape(dtype: Any, tmp_path: Path) -> None:
    module, other = embedding(), embedding(1).weight.astype(dtype)
    module.weight = module.weight.astype(dtype)
    files = saved(tmp_path, module, before=other)
    module.weight = module.weight.astype(mx.float32)
    expected = np.asarray(module.weight)[CHOSEN]
    found = in_files(files, module)
    assert found.weight is None and np.array_equal(found.gather(CHOSEN), expected)


def test_what_is_not_in_the_files_stays_in_memory(tmp_path: Path) -> None:
    module = embedding()
    files = saved(tmp_path, module)
    assert in_files([], module).weight is not None
    module.weight[4999, 127] += 1
    assert in_files(files, module).weight is not None
    module = embedding().to_quantized(group_size=64, bits=4)
    files = saved(tmp_path, module)
    module.biases = module.biases + 1
    found = in_files(files, module)
    assert found.weight is not None and len(module.parameters()) == 3
    assert np.array_equal(found.gather(CHOSEN), weight_of(module).gather(CHOSEN))


def test_files_that_are_cut_off_or_gone_are_not_used(tmp_path: Path) -> None:
    module = embedding()
    files = saved(tmp_path, module)
    os.truncate(files[1], files[1].stat().st_size - 1)
    assert in_files(files, module).weight is not None
    files[1].unlink()
    assert in_files(files, module).weight is not None


def test_a_file_that_is_replaced_keeps_its_rows(tmp_path: Path) -> None:
    module = embedding()
    files, expected = saved(tmp_path, module), np.asarray(module.weight)[CHOSEN]
    found = in_files(files, module)
    mx.save_safetensors(str(tmp_path / "new.safetensors"), dict(embedding(1).parameters()))
    (tmp_path / "new.safetensors").rename(files[1])
    assert np.array_equal(found.gather(CHOSEN), expected)


@pytest.mark.parametrize("size", [0, None])
def test_a_file_that_is_written_to_is_not_read(size: int | None, tmp_path: Path) -> None:
    module = embedding()
    files = saved(tmp_path, module)
    found = in_files(files, module)
    with files[1].open("r+b") as file:
        file.truncate(size) if size is not None else file.write(b"x")
    with pytest.raises(FilesChanged, match=r"model-2\.safetensors was modified while"):
        found.gather(CHOSEN)
