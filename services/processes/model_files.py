"""The files that a model's directory needs, and which are missing or corrupt."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shared.safetensors_header import read_header

_MAX_JSON_BYTES = 100 << 20
INDEX = "model.safetensors.index.json"
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "tiktoken.model")


def problems(path: Path) -> list[str]:
    """Return the problems of the model in ``path``, in words, without reading weights."""
    if not path.is_dir():
        return [f"{path} is not a folder"]
    return [*_config(path), *_weights(path), *_tokenizer(path)]


def weights_in(path: Path) -> int:
    """Return the bytes of the tensors in ``path``. Raises: OSError and ValueError."""
    return sum(map(tensor_bytes, sorted(path.glob("model*.safetensors"))))


def tensor_bytes(path: Path) -> int:
    """Return the bytes of the tensors in a safetensors file, which its header lists. Raises:
    OSError and ValueError."""
    _, size = _header(path)
    return size


def _header(path: Path) -> tuple[int, int]:
    """Return the size of the header including the length before it, and of the tensors."""
    start, header = read_header(path)
    try:
        ends = (int(tensor["data_offsets"][1]) for tensor in header.values())
        return start, max(ends, default=0)
    except (TypeError, KeyError, IndexError):
        raise ValueError(f"{path} is not a safetensors file") from None


def _config(path: Path) -> Iterator[str]:
    found = _json(path / "config.json")
    if isinstance(found, str):
        yield found
    elif not isinstance(found.get("model_type"), str):
        yield "config.json has no model_type"


def _weights(path: Path) -> Iterator[str]:
    files = {file.name: file for file in sorted(path.glob("model*.safetensors"))}
    if (path / INDEX).exists():
        index = _json(path / INDEX)
        if isinstance(index, str):
            yield index
        elif isinstance(index.get("weight_map"), dict):
            named = {str(name) for name in index["weight_map"].values()}
            missing = sorted(name for name in named if not (path / name).is_file())
            if missing:
                some = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
                yield f"{len(missing)} of {len(named)} weight files are missing: {some}"
    elif not files:
        yield "there are no model*.safetensors files"
    for name, file in files.items():
        try:
            before, size = _header(file)
            if file.stat().st_size < before + size:
                yield f"{name} is truncated: {file.stat().st_size} of {before + size} bytes"
        except (OSError, ValueError):
            yield f"{name} is not a safetensors file"


def _tokenizer(path: Path) -> Iterator[str]:
    if not any((path / name).is_file() for name in _TOKENIZERS):
        yield "there is no tokenizer"
    elif (path / "tokenizer.json").exists():
        found = _json(path / "tokenizer.json")
        if isinstance(found, str):
            yield found


def _json(path: Path) -> dict[str, Any] | str:
    """Return the object in ``path``, or the reason why there is none."""
    try:
        with path.open("rb") as file:
            found = json.loads(file.read(_MAX_JSON_BYTES))
    except FileNotFoundError:
        return f"{path.name} is missing"
    except OSError as error:
        return f"{path.name} cannot be read ({error.strerror})"
    except (ValueError, RecursionError):
        return f"{path.name} is not valid JSON"
    return found if isinstance(found, dict) else f"{path.name} is not a JSON object"
