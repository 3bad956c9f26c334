"""Embeddings that are looked up in the files of their checkpoint."""

import os
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn

from engine.backend.file_rows import FilesChanged
from engine.backend.weights import embedding_in, weight_of

KINDS = [("affine", bits, 64) for bits in (2, 3, 4, 5, 6, 8)]
KINDS += [("mxfp4", 4, 32), ("nvfp4", 4, 16), ("mxfp8", 8, 32)]
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


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
@pytest.mark.parametrize(("mode", "bits", "group"), KINDS)
def test_rows_are_those_of_the_embedding_in_memory(
    mode: str, bits: int, group: int, dtype: Any, tmp_path: Path
) -> None:
    plain = embedding()
    plain.weight = plain.weight.astype(dtype)
    module = plain.to_quantized(group_size=group, bits=bits, mode=mode)
    found = embedding_in(saved(tmp_path, module), module)
    assert found is not None and set(found.arrays) == set(module.parameters())
    expected = weight_of(module).gather(CHOSEN)
    assert np.array_equal(found.gather(CHOSEN), expected) and expected.dtype == np.float32


def test_rows_in_fp32_are_found_among_others_of_their_shape(tmp_path: Path) -> None:
    module = embedding()
    found = embedding_in(saved(tmp_path, module, before=embedding(1).weight), module)
    assert found is not None
    assert np.array_equal(found.gather(CHOSEN), np.asarray(module.weight)[CHOSEN])


def test_what_is_not_in_the_files_stays_in_memory(tmp_path: Path) -> None:
    module = embedding()
    files = saved(tmp_path, module)
    assert embedding_in([], module) is None
    module.weight[4999, 127] += 1
    assert embedding_in(files, module) is None
    module = embedding().to_quantized(group_size=64, bits=4)
    files = saved(tmp_path, module)
    module.scales = module.scales.astype(mx.bfloat16)
    assert embedding_in(files, module) is None


def test_files_that_are_cut_off_or_gone_are_not_used(tmp_path: Path) -> None:
    module = embedding()
    files = saved(tmp_path, module)
    os.truncate(files[1], files[1].stat().st_size - 1)
    assert embedding_in(files, module) is None
    files[1].unlink()
    assert embedding_in(files, module) is None


def test_a_file_that_is_replaced_keeps_its_rows(tmp_path: Path) -> None:
    module = embedding()
    files = saved(tmp_path, module)
    found = embedding_in(files, module)
    mx.save_safetensors(str(tmp_path / "new.safetensors"), dict(embedding(1).parameters()))
    (tmp_path / "new.safetensors").rename(files[1])
    assert found is not None
    assert np.array_equal(found.gather(CHOSEN), np.asarray(module.weight)[CHOSEN])


@pytest.mark.parametrize("size", [0, None])
def test_a_file_that_is_written_to_is_not_read(size: int | None, tmp_path: Path) -> None:
    module = embedding()
    files = saved(tmp_path, module)
    found = embedding_in(files, module)
    assert found is not None
    with files[1].open("r+b") as file:
        file.truncate(size) if size is not None else file.write(b"x")
    with pytest.raises(FilesChanged, match=r"model-2\.safetensors was changed while"):
        found.gather(CHOSEN)
