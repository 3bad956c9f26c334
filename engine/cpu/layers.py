"""Linear layers, tied last layers and experts of mlx-lm's models, computed by ONNX Runtime.

On Linux, MLX multiplies quantized weights up to 60 times slower, and its library for dense weights
packs them again in every product. Every architecture that MLX computes therefore gets its products
from here. A product leaves MLX's graph: its input is evaluated, and read in place.
"""

from __future__ import annotations

import gc
import logging
import time
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx_lm.models.mla import MultiLinear, QuantizedMultiLinear
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from engine.backend.allocation import give_back
from engine.cpu.onnx.codes import code_bits
from engine.cpu.onnx.multiplier import ExpertMultiplier, Multiplier
from engine.cpu.onnx.quantized import Precision
from engine.cpu.onnx.weights import expert_weights, weight_of
from shared.settings import CPUPrecision

logger = logging.getLogger(__name__)

FP32_SHARE = 0.25
"""Fraction of the memory available for fp32 copies of weights that are codes in the checkpoint."""
ARRAYS = ("weight", "scales", "biases")
HALVES = (mx.float16, mx.bfloat16)
ROWS = (1, 8, 64)
"""Numbers of rows at which dense products are timed."""
EXPERTS_OF_A_ROW = 2
"""Number of experts of each of these rows."""
WORTH_IT = 0.92
"""A dense product leaves MLX if it takes at most this fraction of the time outside."""
ROUNDS = 3
LONG_S = 0.01
"""A product that takes longer is timed once, else `ROUNDS` times."""


class _Outside:
    """A layer outside MLX. It records whether other code reads its weights."""

    precision: Precision
    read = False
    _multiplier: Any = None

    def packed(self) -> Any:
        """Return the multiplier of the weights, which are packed on first use: in models that leave
        MLX completely, never after the first check."""
        if self._multiplier is None:
            self._multiplier = self.pack()
        return self._multiplier

    def pack(self) -> Any:
        return Multiplier(weight_of(self, self.precision))

    def change_precision(self, precision: Precision) -> None:
        """Pack the weights again on next use."""
        self.precision, self._multiplier = precision, None

    def __getattr__(self, key: str) -> Any:
        if key in ARRAYS:
            vars(self)["read"] = True
        return super().__getattr__(key)  # type: ignore[misc]


class _OutsideLinear(_Outside):
    def __call__(self: Any, x: mx.array) -> mx.array:
        rows = _array(x.reshape(-1, x.shape[-1]))
        found = mx.array(self.packed()(rows)).reshape(*x.shape[:-1], -1).astype(x.dtype)
        return found + self["bias"] if "bias" in self else found


class _OutsideEmbedding(_Outside):
    """An embedding, which may also be the last layer."""

    def as_linear(self: Any, x: mx.array) -> mx.array:
        return _OutsideLinear.__call__(self, x)


class _OutsideExperts(_Outside):
    def pack(self) -> Any:
        return ExpertMultiplier(expert_weights(self, self.precision))

    def __call__(
        self: Any, x: mx.array, indices: mx.array, sorted_indices: bool = False
    ) -> mx.array:
        """Return (..., rows, out) for ``x`` (..., rows, in). The leading axes of ``x`` and
        ``indices`` are equal, or 1 in one of them."""
        *outer, rows, width = x.shape
        shape = np.broadcast_shapes(tuple(outer), indices.shape)
        given = _array(mx.broadcast_to(x, (*shape, rows, width)).reshape(-1, width))
        experts = np.asarray(mx.broadcast_to(indices, shape).astype(mx.int64)).reshape(-1)
        found = mx.array(self.packed()(given, np.repeat(experts, rows)))
        found = found.reshape(*shape, rows, -1).astype(x.dtype)
        return found + mx.expand_dims(self["bias"][indices], -2) if "bias" in self else found


def _array(x: mx.array) -> Any:
    """Evaluate ``x`` and return it in fp32, without a copy if it already is."""
    return np.asarray(x.astype(mx.float32))


_OURS: dict[type, Any] = {
    kind: type(kind.__name__, (ours, kind), {})
    for kind, ours in {
        nn.Linear: _OutsideLinear,
        nn.Embedding: _OutsideEmbedding,
        SwitchLinear: _OutsideExperts,
        nn.QuantizedLinear: _OutsideLinear,
        nn.QuantizedEmbedding: _OutsideEmbedding,
        QuantizedSwitchLinear: _OutsideExperts,
    }.items()
}
_QUANTIZED = (nn.QuantizedLinear, nn.QuantizedEmbedding, QuantizedSwitchLinear)


def chosen_precisions(
    model: nn.Module, wanted: CPUPrecision, memory_bytes: int
) -> dict[str, Precision]:
    """Return how to multiply by each quantized weight, by layer name.

    Layers are ``exact``, in order, until a fraction of ``memory_bytes`` is full, and then
    ``compact``. Experts come last, because a row needs few of them. The layers of one module have
    the same precision, because those with the same input are one product."""
    quantized = {name: each for name, each in model.named_modules() if type(each) in _QUANTIZED}
    if wanted in ("compact", "fast"):
        return dict.fromkeys(quantized, "compact" if wanted == "compact" else "fast")
    tied = not any(name.endswith("lm_head") for name, _ in model.named_modules())
    together: dict[str, list[str]] = defaultdict(list)
    for name, module in quantized.items():
        if tied or not isinstance(module, nn.QuantizedEmbedding):
            together[name.rpartition(".")[0]].append(name)
    left = int(FP32_SHARE * memory_bytes)
    found: dict[str, Precision] = dict.fromkeys(quantized, "compact")
    experts = {name for name, each in quantized.items() if type(each) is QuantizedSwitchLinear}
    for names in sorted(together.values(), key=lambda names: not experts.isdisjoint(names)):
        size = sum(_packed_bytes(quantized[name], "exact") for name in names)
        if size <= left:
            left -= size
            found |= dict.fromkeys(names, "exact")
    return found


class Layers:
    """The layers of ``model`` that leave MLX: those with quantized weights and, with ``dense``,
    fp32 layers whose shape is measured to be faster outside.

    ``precision`` applies to all layers, or is given per quantized layer by name. Unquantized parts
    of a quantized model become fp32, and so do its activations."""

    def __init__(
        self, model: nn.Module, precision: Precision | Mapping[str, Precision], *, dense: bool
    ) -> None:
        names, modules = zip(*model.named_modules(), strict=True)
        if any(type(module) in (*_QUANTIZED, QuantizedMultiLinear) for module in modules):
            for module in modules:
                _widen(module)
        self._replaced: list[Any] = []
        self.names: list[str] = []
        """The layers that left, with their precision."""
        self.products: list[str] = []
        """The quantized ones, with their precision, which is a setting. How fp32 layers multiply is
        measured instead."""
        faster: dict[tuple[int, ...], bool] = {}
        for name, module in zip(names, modules, strict=True):
            is_quantized = type(module) in _QUANTIZED
            if is_quantized or (dense and _is_faster(module, faster)):
                own = precision if isinstance(precision, str) else precision.get(name, "exact")
                _replace(module, own)
                self._replaced.append(module)
                self.names.append(f"{name} {own}")
                if is_quantized:
                    self.products.append(self.names[-1])
        tied = not any(name.endswith("lm_head") for name in names)
        self.nbytes = sum(
            _packed_bytes(module, module.precision)
            for module in self._replaced
            if tied or not isinstance(module, _OutsideEmbedding)
        )
        """Bytes of the packed weights. A tied embedding is also the last layer."""
        if self._replaced:
            logger.info(
                "ONNX Runtime computes %d layers, with %.2f GB of weights, precision %s",
                len(self._replaced),
                self.nbytes / 1e9,
                " and ".join(sorted({module.precision for module in self._replaced})),
            )

    def keep_packed(self) -> None:
        """Drop MLX's copies of the weights, once every path of the model's code has run.

        The code still looks up embeddings, and reads the weights that it has read so far."""
        for module in self._replaced:
            if not isinstance(module, _OutsideEmbedding) and not module.read:
                module.packed()
                for name in ARRAYS:
                    module.pop(name, None)
        _clean()

    def drop(self) -> None:
        """Drop all weights of these layers: the model's code will not run any more."""
        for module in self._replaced:
            module._multiplier = None
            for name in ARRAYS:
                module.pop(name, None)
        self._replaced, self.nbytes = [], 0
        _clean()


def _clean() -> None:
    gc.collect()
    mx.clear_cache()
    give_back()


def _widen(module: Any) -> None:
    """Convert 16-bit values that are not multiplied here to fp32, and MLA's factors too.

    Those are batches of matrices, for which there are no products with codes."""
    if type(module) is QuantizedMultiLinear:
        kind = {"group_size": module.group_size, "bits": module.bits, "mode": module.mode}
        found = [module.pop(name, None) for name in ARRAYS]
        module["weight"] = mx.dequantize(*found, dtype=mx.float32, **kind)
        module.__class__ = MultiLinear
    if type(module) in (nn.QuantizedLinear, QuantizedSwitchLinear):
        return  # their codes are read in place, and their bias is added in fp32
    for name in list(module):
        value = module.get(name)
        if isinstance(value, mx.array) and value.dtype in HALVES:
            module[name] = value.astype(mx.float32)


def _replace(module: Any, precision: Precision) -> None:
    """Compute one layer outside MLX."""
    mx.eval([module[name] for name in ARRAYS if module.get(name) is not None])
    module.precision = precision
    module.__class__ = _OURS[type(module)]


def forecast_packed_bytes(model: nn.Module, wanted: CPUPrecision, memory_bytes: int) -> int:
    """Convert the parts of ``model`` to the types used by `Layers`, and return the bytes of the
    packed quantized weights, without reading any: the weights need not be loaded."""
    precisions = chosen_precisions(model, wanted, memory_bytes)
    names, modules = zip(*model.named_modules(), strict=True)
    if any(type(module) in (*_QUANTIZED, QuantizedMultiLinear) for module in modules):
        for module in modules:
            _widen(module)
    tied = not any(name.endswith("lm_head") for name in names)
    return sum(
        _packed_bytes(module, precisions[name])
        for name, module in zip(names, modules, strict=True)
        if type(module) in _QUANTIZED and (tied or not isinstance(module, nn.QuantizedEmbedding))
    )


def _packed_bytes(module: Any, precision: Precision) -> int:
    """Return the bytes of one layer's weights after `_Outside.pack`."""
    size: int = module["weight"].size
    if "scales" not in module:
        return 4 * size
    size = size * 32 // module.bits
    bits = code_bits(module.bits, module.mode)
    if bits is None or precision == "exact":
        return 4 * size
    kept = max(bits, 4) if precision != "fast" else bits
    parts = 2 if bits == 8 and precision == "compact" else 1
    return int(size * kept // 8 + 12 * parts * module["scales"].size)


def _is_faster(module: Any, known: dict[tuple[int, ...], bool]) -> bool:
    """Return whether a dense layer of this shape is faster outside MLX."""
    kinds = (nn.Linear, nn.Embedding, SwitchLinear)
    if type(module) not in kinds or module["weight"].dtype != mx.float32:
        return False
    shape = module["weight"].shape
    if shape not in known:
        stock: Any = SwitchLinear(1, 1, 1) if len(shape) == 3 else nn.Linear(1, 1)
        ours: Any = SwitchLinear(1, 1, 1) if len(shape) == 3 else nn.Linear(1, 1)
        for each in (stock, ours):
            each.weight, each.bias = module["weight"], mx.zeros(shape[:-1])
        _replace(ours, "exact")
        ours.packed()
        known[shape] = _seconds(ours) < WORTH_IT * _seconds(stock)
    return known[shape]


def _seconds(layer: Any) -> float:
    """Return the total time of products of `ROWS` rows."""
    total = 0.0
    for rows in ROWS:
        given = [mx.random.normal((rows, layer["weight"].shape[-1]), key=mx.random.key(rows))]
        if isinstance(layer, SwitchLinear):
            chosen = mx.random.randint(0, layer.num_experts, (rows, EXPERTS_OF_A_ROW))
            given = [given[0][:, None, None], chosen]
        mx.eval(given)
        shortest = float("inf")  # other load on the machine only adds time
        for _ in range(ROUNDS):
            started = time.perf_counter()
            mx.eval(layer(*given))
            shortest = min(shortest, time.perf_counter() - started)
            if shortest > LONG_S:
                break
        total += shortest
    return total
