"""Reads LoRA adapter files in the formats of mlx-lm and PEFT, and checks them against a model.

No tensor is read before the header is found to fit the model, so memory use is bounded by the
rank and the model's layers. Runs on threads other than the main one; nothing here uses MLX."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shared.safetensors_header import as_fp32, read_header

Array = NDArray[np.float32]

CONFIG = "adapter_config.json"
MLX_LM, PEFT = "adapters.safetensors", "adapter_model.safetensors"
MAX_CONFIG_BYTES = 1 << 20
MAX_HEADER_BYTES = 8 << 20
DIGEST_BYTES = 16
_TYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
}
_PREFIXES = ("base_model.model.", "base_model.", "")
_OTHER_KINDS = (
    *("use_dora", "fan_in_fan_out", "modules_to_save", "trainable_token_indices"),
    *("alora_invocation_tokens", "layer_replication", "use_qalora"),
)
"""Options of PEFT that make an adapter more than a sum of two products."""
_CHANGE_THE_MODEL = ("pissa", "olora", "corda")
"""PEFT initializations that also change the weights of the base model."""
_NAMED = 3
"""Max number of names listed in an error."""


class AdapterError(Exception):
    """An adapter cannot be used. The message is one line and starts with the adapter's
    directory."""


class Shape(NamedTuple):
    """Sizes of a linear layer."""

    inputs: int
    outputs: int


class LowRank(NamedTuple):
    """A low-rank update of a weight: ``x @ down @ up`` is added to the product."""

    down: Array  # (in, rank)
    up: Array  # (rank, out), includes the adapter's scale


@dataclass(frozen=True, kw_only=True)
class AdapterWeights:
    """An adapter in memory."""

    layers: Mapping[str, LowRank]  # keyed by the name of the model's linear layer
    digest: str  # of the content, independent of format and machine

    @property
    def rank(self) -> int:
        return max(int(each.down.shape[1]) for each in self.layers.values())


class _Layout(NamedTuple):
    """Names and layout of a layer's two factors in one format."""

    file: str
    down: str
    up: str
    transposed: bool  # (rank, in) and (out, rank)


_OF_MLX_LM = _Layout(MLX_LM, ".lora_a", ".lora_b", False)
_OF_PEFT = _Layout(PEFT, ".lora_A.weight", ".lora_B.weight", True)


def read(path: Path, shapes: Mapping[str, Shape], max_rank: int) -> AdapterWeights:
    """Return the adapter in directory ``path`` for a model whose linear layers have ``shapes``.
    Raises: `AdapterError`."""
    with _explained(path):
        opened = _open(path)
        pairs = _pairs(opened.header, opened.layout, shapes, max_rank)
        scale = _scales(opened.config, opened.layout)
        layers = {
            name: _factors(opened, pair, scale(pair.written, pair.rank))
            for name, pair in sorted(pairs.items())
        }
    return AdapterWeights(layers=layers, digest=_digest(layers))


def check(path: Path) -> None:
    """Check the adapter files in directory ``path`` without the model. Raises: `AdapterError`."""
    with _explained(path):
        opened = _open(path)
        _scales(opened.config, opened.layout)


class _Opened(NamedTuple):
    """The metadata of an adapter, before its weights are read."""

    config: dict[str, Any]
    layout: _Layout
    file: Path
    start: int  # offset of the weights in the file, in bytes
    header: dict[str, Any]


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn any failure to read an adapter's files into an `AdapterError`."""
    try:
        yield
    except _Unfit as error:
        raise AdapterError(f"the adapter in {path} cannot be used: {error}") from None
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise AdapterError(f"the adapter in {path} cannot be used: {reason}") from error


def _open(path: Path) -> _Opened:
    config = _config(path)
    layout = _OF_PEFT if "peft_type" in config else _OF_MLX_LM
    _refuse_kind(config, layout)
    file = path / layout.file
    if not file.is_file():
        raise _Unfit(f"it has no {layout.file}; weights are only read from safetensors")
    start, header = read_header(file, MAX_HEADER_BYTES)
    return _Opened(config, layout, file, start, header)


class _Unfit(Exception):
    """The reason why an adapter cannot be used."""


class _Pair(NamedTuple):
    """The two factors of a layer, as the header describes them."""

    down: Any
    up: Any
    rank: int
    written: str  # the layer's name in the file


def _config(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        raise _Unfit("there is no such directory")
    file = path / CONFIG
    if not file.is_file():
        raise _Unfit(f"it has no {CONFIG}")
    if file.stat().st_size > MAX_CONFIG_BYTES:
        raise _Unfit(f"its {CONFIG} has over {MAX_CONFIG_BYTES} bytes")
    try:
        config = json.loads(file.read_bytes())
    except (ValueError, RecursionError):
        raise _Unfit(f"its {CONFIG} is not JSON") from None
    if not isinstance(config, dict):
        raise _Unfit(f"its {CONFIG} is not a JSON object")
    return config


def _refuse_kind(config: Mapping[str, Any], layout: _Layout) -> None:
    """Raise `_Unfit` if the adapter is not plain LoRA."""
    if layout is _OF_MLX_LM:
        kind = config.get("fine_tune_type", "lora")
        if kind != "lora":
            raise _Unfit(f"its fine_tune_type is {kind!r}; only 'lora' is known here")
        return
    if config["peft_type"] != "LORA":
        raise _Unfit(f"its peft_type is {config['peft_type']!r}; only 'LORA' is known here")
    if config.get("bias", "none") != "none":
        raise _Unfit(f"it changes biases (bias is {config['bias']!r}), which are not read")
    for name in _OTHER_KINDS:
        if config.get(name):
            raise _Unfit(f"it sets {name}, which is not known here")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGE_THE_MODEL):
        raise _Unfit(
            f"its init_lora_weights is {start!r}: it may need other weights of the model; convert "
            "it to a plain LoRA adapter"
        )


def _scales(config: Mapping[str, Any], layout: _Layout) -> Any:
    """Return a function that gives a layer's scale from its name in the file and its rank."""
    if layout is _OF_MLX_LM:
        scale = _number(config["lora_parameters"]["scale"], "lora_parameters.scale")
        return lambda name, rank: scale
    alpha = _number(config["lora_alpha"], "lora_alpha")
    patterns = config.get("alpha_pattern") or {}
    if not isinstance(patterns, dict):
        raise _Unfit("its alpha_pattern is not an object")
    try:  # as in PEFT
        known = [(re.compile(rf"(.*\.)?({key})$"), value) for key, value in patterns.items()]
    except re.error as error:
        raise _Unfit(f"its alpha_pattern has no regular expression: {error}") from None

    def of(written: str, rank: int) -> float:
        name = next(_unwrapped(written))
        own = next((value for pattern, value in known if pattern.match(name)), alpha)
        root = math.sqrt(rank) if config.get("use_rslora") else rank
        return _number(own, "alpha_pattern") / root

    return of


def _number(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise _Unfit(f"its {name} is {value!r}, which is no number")
    return float(value)


def _pairs(
    header: Mapping[str, Any], layout: _Layout, shapes: Mapping[str, Shape], max_rank: int
) -> dict[str, _Pair]:
    """Return the factors of each model layer in ``header``. Raises `_Unfit` if there are unknown
    tensors, or factors of the wrong size."""
    found: dict[str, dict[str, Any]] = {}
    strange = []
    for name, entry in header.items():
        suffix = next((s for s in (layout.down, layout.up) if name.endswith(s)), None)
        if suffix is None:
            strange.append(name)
            continue
        found.setdefault(name.removesuffix(suffix), {})[suffix] = entry
    if strange:
        raise _Unfit(f"it has weights that are not LoRA's: {_some(strange)}")
    if not found:
        raise _Unfit(f"{layout.file} has no weights")
    known = {written: _layer_of(written, shapes) for written in found}
    if missing := [written for written, layer in known.items() if layer is None]:
        raise _Unfit(
            f"the model has no linear layers {_some(missing)} to which an adapter can be added"
        )
    pairs = {}
    for written, both in found.items():
        layer = known[written]
        assert layer is not None
        if lacking := [suffix for suffix in (layout.down, layout.up) if suffix not in both]:
            raise _Unfit(f"it lacks {written}{lacking[0]}")
        if layer in pairs:
            raise _Unfit(f"it has {layer} twice")
        pairs[layer] = _checked(written, both, layout, shapes[layer], max_rank)
    return pairs


def _layer_of(written: str, shapes: Mapping[str, Shape]) -> str | None:
    """Return the model's name for the layer that a file calls ``written``. The file may use the
    same name, the name in PEFT's wrapper, or the name inside a multimodal model."""
    for name in _unwrapped(written):
        for each in (name, f"language_model.{name}"):
            if each in shapes:
                return each
    return None


def _unwrapped(written: str) -> Iterator[str]:
    """Yield possible names of a layer without PEFT's wrapper, the most likely one first."""
    return (written.removeprefix(p) for p in _PREFIXES if written.startswith(p))


def _checked(
    written: str, both: Mapping[str, Any], layout: _Layout, shape: Shape, max_rank: int
) -> _Pair:
    down, up = both[layout.down], both[layout.up]
    sizes = [tuple(map(int, each["shape"])) for each in (down, up)]
    if any(len(size) != 2 for size in sizes):
        raise _Unfit(f"the factors of {written} are not matrices")
    if layout.transposed:
        sizes = [size[::-1] for size in sizes]
    (inputs, rank), (inner, outputs) = sizes
    if inner != rank or (inputs, outputs) != shape:
        raise _Unfit(
            f"{written} is {inputs} x {rank} and {inner} x {outputs}, and the model's layer is "
            f"{shape.inputs} x {shape.outputs}: it is an adapter of another model"
        )
    if not 1 <= rank <= max_rank:
        raise _Unfit(f"{written} has rank {rank}, over --max-adapter-rank, which is {max_rank}")
    return _Pair(down, up, rank, written)


def _factors(opened: _Opened, pair: _Pair, scale: float) -> LowRank:
    down, up = (_tensor(opened.file, opened.start, entry) for entry in (pair.down, pair.up))
    if opened.layout.transposed:
        down, up = down.T, up.T
    up = up * np.float32(scale)
    if not (np.isfinite(down).all() and np.isfinite(up).all()):
        raise _Unfit(f"the weights of {pair.written} are not finite")
    return LowRank(np.ascontiguousarray(down), np.ascontiguousarray(up))


def _tensor(file: Path, start: int, entry: Any) -> Array:
    """Return a tensor from a safetensors file in fp32."""
    kind, shape = entry["dtype"], tuple(map(int, entry["shape"]))
    if kind not in _TYPES:
        raise _Unfit(f"its weights are in {kind!s:.20}; only {', '.join(_TYPES)} are read")
    first, end = map(int, entry["data_offsets"])
    if first < 0 or end - first != math.prod(shape) * _TYPES[kind].itemsize:
        raise _Unfit(f"{file.name} contradicts itself")
    with file.open("rb") as opened:
        opened.seek(start + first)
        content = opened.read(end - first)
    if len(content) != end - first:
        raise _Unfit(f"{file.name} ends too early")
    return as_fp32(kind, np.frombuffer(content, _TYPES[kind])).reshape(shape)


def _digest(layers: Mapping[str, LowRank]) -> str:
    digest = blake2b(digest_size=DIGEST_BYTES, person=b"adapter-v1")
    for name, (down, up) in layers.items():
        digest.update(f"{name} {down.shape} {up.shape};".encode())
        digest.update(down.data)
        digest.update(up.data)
    return digest.hexdigest()


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(f"{name:.100}" for name in names[:_NAMED]) + more
