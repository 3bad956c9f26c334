"""Passes of a vision encoder, computed a few layers at a time.

mlx-vlm computes a picture's embeddings in one call. As in `engine.batch.layered`, that call runs
on its own stack. It is suspended before the next layer of the tower and resumed later, so
running streams continue in between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from greenlet import greenlet
from mlx import nn

from engine import device
from engine.device import TowerLayers

Arrays = dict[str, mx.array]


class VisionEncoder:
    """The parts of a multimodal model that compute embeddings of pictures."""

    def __init__(self, model: Any, image_token_id: int, hidden: int, dtype: mx.Dtype) -> None:
        """``model`` is mlx-vlm's model with its weights. Its language model is removed.
        Embeddings have ``hidden`` elements of ``dtype``, as in the language model."""
        model.language_model = _NoLanguageModel(hidden, dtype)
        self.model = model
        self.image_token_id = image_token_id
        self.hidden, self.dtype = hidden, dtype
        self.axes_of_pairs: Sequence[int] = ()
        """As in `engine.batch.axes.Axes`; empty if positions have one axis."""
        self.deep_layers = 0
        """Layers of the language model whose outputs get features added. The features follow the
        embeddings, side by side."""
        self.attends_both_ways = False
        """Whether the tokens of a picture attend to each other in both directions."""
        self.unscaled = 1.0
        """Embeddings are divided by the factor that only mlx-lm's language model multiplies them
        by."""
        self._gate = _Gate()
        self.layers = _divide(model, self._gate)
        """Number of parts of a pass that can be computed separately."""

    def use_host(self) -> None:
        """Compute layers outside of MLX from now on, if that is possible here."""
        self._gate.host = device.tower_layers()

    @property
    def host(self) -> TowerLayers | None:
        return self._gate.host

    def begin(self, token_ids: Sequence[int], arrays: Arrays) -> EncoderPass:
        """Return the pass for a picture with ``token_ids`` in a prompt, and these ``arrays``."""
        tokens = list(token_ids)

        def compute() -> mx.array:
            others = {name: array for name, array in arrays.items() if name != "pixel_values"}
            ids = mx.array([tokens])
            found = self.model.get_input_embeddings(
                ids, arrays["pixel_values"], mask=mx.ones_like(ids), **others
            )
            places = [i for i, token in enumerate(tokens) if token == self.image_token_id]
            parts: list[mx.array] = [found.inputs_embeds[0][mx.array(places)] / self.unscaled]
            if self.deep_layers:
                parts += list(found.deepstack_visual_embeds)
            whole = parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)
            return whole.astype(self.dtype)

        return EncoderPass(self._gate, compute)


class EncoderPass:
    """One call of an encoder. It starts with the first `advance`."""

    def __init__(self, gate: _Gate, compute: Callable[[], mx.array]) -> None:
        self._gate, self._call = gate, greenlet(compute)
        self._entered = self._end = 0
        self._inputs: list[mx.array] = []
        self.embeddings: mx.array | None = None
        """(embeddings, hidden and features), once the pass is complete."""

    def advance(self, layers: int | None) -> list[mx.array]:
        """Compute this many more layers; None: all that are left. Return the arrays to evaluate."""
        self._end = self._end + layers if layers is not None else 1 << 30
        if self.embeddings is not None:  # the pass had fewer layers than expected
            return [self.embeddings]
        self._gate.current = self
        try:
            found = self._call.switch()
        finally:
            self._gate.current = None
        if self._call.dead:
            self.embeddings = found
            return [found]
        return self._inputs

    def enter_layer(self, inputs: Sequence[Any]) -> None:
        """Suspend the call before a layer with these ``inputs`` if no more layers are wanted
        now."""
        if self._entered >= self._end:
            self._inputs = [x for x in inputs if isinstance(x, mx.array)]
            assert self._call.parent is not None
            self._call.parent.switch()
            self._inputs = []
        self._entered += 1

    def close(self) -> None:
        """End the call if it is not complete."""
        if self._call and not self._call.dead:
            self._call.throw()


class _Gate:
    """Holds the pass that is being computed, and what computes layers in place of MLX."""

    current: EncoderPass | None = None
    host: TowerLayers | None = None


class _TowerLayer(nn.Module):  # type: ignore[misc]
    """A tower layer that reports each call to the gate."""

    def __init__(self, layer: Any, gate: _Gate) -> None:
        super().__init__()
        self.layer = layer
        self._gate = gate

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        host = self._gate.host
        if host is not None and host.is_tracing:  # within another layer
            return self.layer(*args, **kwargs)
        if (current := self._gate.current) is not None:
            current.enter_layer([*args, *kwargs.values()])
        return self.layer(*args, **kwargs) if host is None else host.call(self.layer, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)


class _NoLanguageModel:
    """Replaces the language model where mlx-vlm merges embeddings of pictures and text."""

    embed_scale = 1.0
    hidden_size_per_layer_input = 0

    def __init__(self, hidden: int, dtype: mx.Dtype) -> None:
        self._hidden, self._dtype = hidden, dtype
        self.model = self

    def get_rope_index(self, *args: Any, **kwargs: Any) -> tuple[None, None]:
        """Skip positions: the scheduler computes them, from the whole prompt."""
        return None, None

    def embed_tokens(self, tokens: mx.array) -> mx.array:
        return mx.zeros((*tokens.shape, self._hidden), self._dtype)


def _divide(model: nn.Module, gate: _Gate) -> int:
    """Make the layers of all towers in ``model`` report their calls. Return their number."""
    count = 0
    for _, module in model.named_modules():
        for layers in module.values():
            if isinstance(layers, list) and len(layers) > 1 and _are_layers(layers):
                layers[:] = [_TowerLayer(layer, gate) for layer in layers]
                count += len(layers)
    return max(1, count)


def _are_layers(found: list[Any]) -> bool:
    """Return whether ``found`` are the layers of a tower: of one class, with their own
    parameters."""
    first = type(found[0])
    return (
        issubclass(first, nn.Module)
        and all(type(x) is first for x in found)
        and bool(found[0].children())
    )
