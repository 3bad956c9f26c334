"""Llama-like decoders on CPUs, in fp32: a pass without MLX.

On Linux, MLX computes everything except matmuls on one thread. Each operation of a graph takes
several microseconds to build and to dispatch, and so does each transition between the graph and
other code. A model that consists only of the layers below is therefore computed here: one call
of ONNX Runtime for everything between two attentions, and attention in between.

Arrays are (tokens, ...): rows of a prefill are packed one after the other without padding."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import mlx.core as mx
import numpy as np
from mlx import nn

from engine.adapters.places import AdapterStore
from engine.batch.axes import Axes
from engine.batch.given import Given
from engine.batch.ragged import Row, embedding_scale
from engine.cache.layout import KVNode, Layout
from engine.cache.slots import Slots
from engine.cpu.attention.host_batch import HostBatch
from engine.cpu.decoder import stretches
from engine.cpu.decoder.adapted import AdapterRows, DecoderStore
from engine.cpu.decoder.blocks import Norm, TransformerBlock
from engine.cpu.decoder.rotary import Rotary
from engine.cpu.decoder.stretches import Head
from engine.cpu.onnx import graphs
from engine.cpu.onnx.graphs import Session, Unsupported
from engine.cpu.onnx.quantized import of_all
from engine.cpu.onnx.weights import Embedding, weight_of
from engine.cpu.pages.rounding import Array, Arrays

logger = logging.getLogger(__name__)

FAMILY = (
    *("llama", "qwen2", "qwen3", "smollm3", "phi3", "granite", "olmo2"),
    *("gemma2", "gemma3", "gemma3_text", "qwen3_moe", "mixtral", "gpt_oss"),
)
"""Modules of mlx-lm whose `Model` a `Decoder` can compute."""


WRAPPERS = ("mistral3", "pixtral", "qwen2_vl", "qwen3_vl", "qwen3_vl_moe")
"""Modules whose `Model` only calls the language model inside it."""


class _Layer(NamedTuple):
    """The properties of a layer that attention needs."""

    heads: int
    kv_heads: int
    softcap: float | None
    sinks: Array | None


class Decoder:
    """Computes passes of ``model``. Raises `Unsupported` if it cannot be computed here."""

    def __init__(self, model: Any, layout: Layout) -> None:
        if not knows(model):
            raise Unsupported("its class is not supported")
        if layout.tree != tuple(KVNode(i) for i in range(len(layout.layers))):
            raise Unsupported("its cache holds more than keys and values of each layer")
        whole, model = model, getattr(model, "language_model", model)
        inner = model.model
        self._embedding = Embedding(inner.embed_tokens)
        self._deep_layers = getattr(whole, "deep_layers", 0)
        if self._deep_layers >= len(inner.layers):
            raise Unsupported("features of pictures are added to its last layer")
        embedding = self._embedding.weight
        assert embedding is not None
        self._embedding_scale = embedding_scale(model)
        head = Head(
            Norm.of(inner.norm),
            weight_of(model.lm_head if "lm_head" in model else inner.embed_tokens),
            1 / getattr(model, "logits_scaling", 1),
            getattr(model, "final_logit_softcapping", None),
        )
        ropes = [block.self_attn.rope for block in inner.layers]
        self._rotaries = rotaries(ropes, [layer.key_dim for layer in layout.layers])
        self._owned = [model.lm_head] if "lm_head" in model else []
        self._layers: list[_Layer] = []
        self.stretches: list[Session] = []
        """The computations before, between and after the attentions of the layers, in this
        order."""
        hidden = embedding.shape[1]
        before: TransformerBlock | None = None
        kinds = [head.weight.same_bits]
        for module, rotary in zip(inner.layers, self._rotaries, strict=True):
            block = TransformerBlock(module)
            if before is None:
                self.stretches.append(stretches.first(hidden, block, rotary))
            else:
                adds = len(self._layers) <= self._deep_layers
                self.stretches.append(stretches.between(hidden, before, block, rotary, adds=adds))
            self._layers.append(_Layer(block.heads, block.kv_heads, block.softcap, block.sinks))
            self._owned += block.owned
            kinds.append(block.same_bits)
            before = block
        assert before is not None
        self.stretches.append(stretches.last(hidden, before, head))
        self.adapters = DecoderStore(self.stretches)
        self.same_bits = of_all(kinds)
        """The numbers of rows among which a row has the same bits."""

    def __call__(
        self, batch: DecoderBatch, tokens: Array, *, silent: bool, given: Given | None = None
    ) -> Array | None:
        """Return logits (tokens, vocabulary) of the packed ``tokens``, or of the ``sampled`` ones
        of the batch; None if ``silent``."""
        count, positions = len(tokens), batch.positions
        if given is not None and given.axes is not None:
            positions = given.axes.positions
        even = batch.deterministic and self.same_bits == "even"
        if even and count % 2:
            tokens = np.append(tokens, tokens[:1])
            positions = np.append(positions, positions[..., :1], axis=-1)
        adapted = partial(self.adapters.feeds, rows=batch.adapters, padded=len(tokens))
        x = self._embedding.gather(tokens)
        if given is not None:
            x = np.array(x)
            x[given.places] = np.asarray(given.embeddings.astype(mx.float32))
        if self._embedding_scale != 1:
            x = x * self._embedding_scale
        tables = self._tables(positions, None if given is None else given.axes)
        x, *new = self.stretches[0](x, *tables[self._rotaries[0]], named=adapted(0))
        found: Array | None = None
        for number in range(len(self._layers)):
            if batch.division is not None:
                batch.division.enter_layer(number)
            found = self._attend(batch, number, *new, last=silent)
            if found is None:
                return None
            if number + 1 == len(self._layers):
                break
            turns = tables[self._rotaries[number + 1]]
            added = [] if number >= self._deep_layers else [_added(x, number, given)]
            named = adapted(number + 1)
            x, *new = self.stretches[number + 1](x, found, *added, *turns, named=named)
        places = batch.sampled
        if places is not None and found is not None and batch.adapters is None:
            # Adapters' factors would be those of all tokens.
            count = len(places)
            padded = places + places[:1] * (even and count % 2)
            x, found, places = x[padded], found[padded], None
        logits: Array = self.stretches[-1](x, found, named=adapted(len(self._layers)))[0]
        return logits[:count] if places is None else logits[places]

    def _attend(
        self,
        batch: DecoderBatch,
        number: int,
        queries: Array,
        keys: Array,
        values: Array,
        *,
        last: bool,
    ) -> Array | None:
        """Store keys and values, and return the result of attention: (tokens, heads * dim).

        With ``last``, return None once the last layer's keys and values are stored."""
        layer, kept = self._layers[number], batch.layout.layers[number]
        padded, tokens, heads = len(queries), len(batch.positions), layer.kv_heads
        keys, values = (new[:tokens].reshape(tokens, heads, -1) for new in (keys, values))
        batch.store(number, batch.unpacked(keys), batch.unpacked(values))
        if last and number + 1 == len(self._layers):
            batch.attend_to_nothing(number)
            return None
        grouped = queries[:tokens].reshape(tokens, heads, layer.heads // heads, -1)
        found: Array = np.empty((padded, *grouped.shape[1:-1], kept.value_dim), np.float32)
        found[tokens:] = 0
        batch.attend_to(
            number,
            batch.unpacked(grouped),
            batch.unpacked(found[:tokens]),
            kept.window,
            layer.sinks,
            layer.softcap,
        )
        return found.reshape(padded, -1)

    def _tables(
        self, positions: np.ndarray[Any, Any], axes: Axes | None
    ) -> dict[Rotary, Sequence[Array]]:
        """Return the arguments for each kind of positions: (tokens,), or (3, tokens) with
        ``axes``."""
        found: dict[Rotary, Sequence[Array]] = {}
        for rotary in set(self._rotaries):
            if not rotary.turned:
                found[rotary] = ()
            elif axes is None:
                found[rotary] = rotary.tables(positions)
            else:
                each = zip(*(rotary.tables(axis) for axis in positions), strict=True)
                found[rotary] = [axes.spread(parts) for parts in each]
        return found

    def release_weights(self, files: Sequence[Path]) -> None:
        """Drop MLX's copies of weights that are packed here, or can be looked up in the
        checkpoint's ``files``."""
        for module in self._owned:
            module.weight = mx.zeros((0,))
        self._embedding.read_from(files)


def _added(x: Array, number: int, given: Given | None) -> Array:
    """Return what is added to a layer's output: features of pictures."""
    added = np.zeros_like(x)
    if given is not None:
        added[given.places] = np.asarray(given.deep[number].astype(mx.float32))
    return added


def rotaries(ropes: Sequence[nn.Module], dims: Sequence[int]) -> list[Rotary]:
    """Return the rotation of each layer. Layers with equal rotations share their tables."""
    known: list[tuple[int, Rotary]] = []
    found = []
    for rope, dim in zip(ropes, dims, strict=True):
        same = next((r for size, r in known if size == dim and r.same_as(rope)), None)
        if same is None:
            same = Rotary(rope, dim)
            known.append((dim, same))
        found.append(same)
    return found


def knows(model: Any) -> bool:
    """Return whether ``model`` belongs to the `FAMILY`."""
    parts = (model, getattr(model, "language_model", model))
    family = {f"mlx_lm.models.{name}" for name in (*FAMILY, *WRAPPERS)}
    return all(part.__class__.__module__ in family for part in parts)


class DecoderBatch(HostBatch):
    """A pass of `decoder`, which replaces the model; see `bind`."""

    packs_rows = True
    runs_model = False
    decoder: ClassVar[Decoder]

    def __init__(self, layout: Layout, slots: Slots, rows: Sequence[Row]) -> None:
        super().__init__(layout, slots, rows)
        self.positions = np.concatenate([np.arange(r.start, r.end) + r.shift for r in rows])
        self._cuts = list(pairwise(self.first_tokens))
        places = [row.adapter for row in rows]
        widths = [row.width for row in rows]
        self.adapters = AdapterRows(places, widths) if any(places) else None

    @classmethod
    def adapter_store(cls, store: AdapterStore) -> AdapterStore:
        return cls.decoder.adapters

    @classmethod
    def make_deterministic(cls) -> bool:
        keeps_bits = cls.decoder.same_bits != "none" and cls.decoder.adapters.same_bits
        cls.deterministic = keeps_bits
        return cls.deterministic

    @classmethod
    def release_weights(cls, files: Sequence[Path] = ()) -> None:
        cls.decoder.release_weights(files)

    def packed_logits(self, model: Any, inputs: mx.array) -> mx.array:
        return mx.array(self.decoder(self, self._packed(inputs), silent=False))

    def logits(
        self, model: Any, inputs: mx.array, *, kv_only: bool = False, given: Given | None = None
    ) -> mx.array:
        self.given = given
        tokens = self._packed(inputs)
        found = self.decoder(self, tokens, silent=kv_only, given=given)
        if found is None:
            return mx.zeros((*inputs.shape, 0))
        if tokens.size == inputs.size:
            return mx.array(found).reshape(*inputs.shape, -1)
        padded = np.zeros((*inputs.shape, found.shape[-1]), np.float32)
        for target, (start, end) in zip(padded, self._cuts, strict=True):
            target[: end - start] = found[start:end]
        return mx.array(padded)

    def _packed(self, inputs: mx.array) -> Array:
        """Return the tokens of ``inputs`` (batch, width) without padding."""
        rows = zip(np.asarray(inputs), self.rows, strict=True)
        return np.concatenate([ids[: row.width] for ids, row in rows])

    def unpacked(self, packed: Array) -> Arrays:
        """Return each row's part of ``packed`` (tokens, ..., dim): (..., width, dim)."""
        if self.by_token:
            return packed[..., None, :]
        return [np.moveaxis(packed[start:end], 0, -2) for start, end in self._cuts]


def bind(model: Any, layout: Layout) -> type[DecoderBatch] | None:
    """Return the class of batches for ``model``, None if it cannot be computed here."""
    if why := graphs.unusable():
        logger.warning("MLX computes the model, which is slower: %s", why)
        return None
    try:
        decoder = Decoder(model, layout)
    except Unsupported as reason:
        logger.info("the model is computed layer by layer in MLX: %s", reason)
        return None
    return type("DecoderBatch", (DecoderBatch,), {"decoder": decoder})
