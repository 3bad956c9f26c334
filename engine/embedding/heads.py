"""The vector or score of a text from its hidden states, in NumPy and fp32."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from engine.embedding.checkpoint import Pooling, TextCheckpoint
from engine.model.encoder import Text
from engine.model.errors import ModelUnavailable

Array = NDArray[np.float32]
States = list[Array]
"""The hidden states of each text, (tokens, hidden)."""
Head = Callable[[Array], Array]
"""Computes a row from the states (tokens, hidden) of one text."""


class StatesModel(Protocol):
    def states(self, texts: Sequence[Text]) -> Generator[None, None, States]:
        """Compute the hidden states of ``texts``, in several parts."""


class HeadedModel:
    """An `engine.embedding.core.TextModel`: hidden states, and a head over those of each text."""

    def __init__(self, body: StatesModel, head: Head, *, vocab_size: int, max_tokens: int) -> None:
        self._body, self._head = body, head
        self._vocab_size, self._max_tokens = vocab_size, max_tokens

    def compute(self, texts: Sequence[Text]) -> Generator[None, None, Array]:
        states = yield from self._body.states(texts)
        return np.stack([self._head(each) for each in states])

    def check(self, text: Text) -> str | None:
        if len(text) > self._max_tokens:
            return f"a text has {len(text)} tokens; the model's limit is {self._max_tokens}"
        if not 0 <= min(text.token_ids) <= max(text.token_ids) < self._vocab_size:
            return f"a token id is not less than {self._vocab_size}"
        return None


def embedding_head(checkpoint: TextCheckpoint, dimensions: int) -> tuple[Head, int]:
    """Return the head that computes vectors from states of ``dimensions``, and their length."""
    layers = []
    for dense in checkpoint.dense:
        found = mx.load(str(dense.weights))
        assert isinstance(found, dict)
        weight, bias = _array(found["linear.weight"]), found.get("linear.bias")
        if weight.shape[1] != dimensions:
            raise ModelUnavailable(
                f"{dense.weights} expects vectors of {weight.shape[1]}, not {dimensions}"
            )
        dimensions = weight.shape[0]
        layers.append((weight, None if bias is None else _array(bias), dense.activation))

    def head(states: Array) -> Array:
        vector = pooled(states, checkpoint.pooling)
        for weight, bias, activation in layers:
            vector = weight @ vector if bias is None else weight @ vector + bias
            vector = np.tanh(vector) if activation == "tanh" else vector
        return normalized(vector) if checkpoint.normalizes else vector

    return head, dimensions


def pooled(states: Array, how: Pooling) -> Array:
    """Return one vector of the ``states`` (tokens, hidden) of a text."""
    match how:
        case "cls":
            return np.asarray(states[0])
        case "lasttoken":
            return np.asarray(states[-1])
        case "max":
            return np.asarray(states.max(0))
        case "mean":
            return np.asarray(states.mean(0))
        case "weightedmean":
            weights = np.arange(1, len(states) + 1, dtype=np.float32)
            return np.asarray(weights @ states / weights.sum())


def normalized(vector: Array) -> Array:
    """Return ``vector`` normalized to length 1, unchanged if it is zero."""
    length = np.float32(np.linalg.norm(vector))
    return vector / length if length > 0 else vector


def classifier_head(family: str, config: Mapping[str, Any], rest: Mapping[str, mx.array]) -> Head:
    """Return the head of an encoder that scores a pair: its checkpoint's classifier, followed by a
    sigmoid. Raises `ModelUnavailable` if weights are missing."""
    arrays = {name: _array(array) for name, array in rest.items()}

    def layer(name: str) -> Callable[[Array], Array]:
        if f"{name}.weight" not in arrays:
            raise ModelUnavailable(f"cannot load the model: {name}.weight is missing")
        weight, bias = arrays[f"{name}.weight"], arrays.get(f"{name}.bias")
        return lambda x: weight @ x if bias is None else weight @ x + bias

    if family == "bert":
        dense, out = layer("pooler.dense"), layer("classifier")
        return lambda states: _sigmoid(out(np.tanh(dense(states[0]))))
    if family in ("roberta", "xlm-roberta"):
        dense, out = layer("classifier.dense"), layer("classifier.out_proj")
        return lambda states: _sigmoid(out(np.tanh(dense(states[0]))))
    if family == "modernbert":
        dense, out = layer("head.dense"), layer("classifier")
        norm, bias = arrays["head.norm.weight"], arrays.get("head.norm.bias")
        pooling: Pooling = "mean" if config.get("classifier_pooling") == "mean" else "cls"
        eps = float(config.get("norm_eps", 1e-5))

        def score(states: Array) -> Array:
            x = _gelu(dense(pooled(states, pooling)))
            x = (x - x.mean()) / np.sqrt(x.var() + np.float32(eps)) * norm
            return _sigmoid(out(x if bias is None else x + bias))

        return score
    raise ModelUnavailable(f"{family} is not supported as a reranking model")


def yes_no_head(model: Any, path: Path) -> Head:
    """Return the head of a decoder that ranks by the probability of "yes" versus "no" as the next
    token. Raises `ModelUnavailable` if these are not tokens of its vocabulary."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    ids = [tokenizer.token_to_id(word) for word in ("yes", "no")]
    if None in ids:
        raise ModelUnavailable(
            f'the model in {path} cannot rank: "yes" and "no" are not tokens of its vocabulary'
        )
    layer = model.lm_head if "lm_head" in model else model.model.embed_tokens
    yes, no = (_array(row) for row in _rows(layer, ids))

    def head(states: Array) -> Array:
        return _sigmoid(np.asarray([(yes - no) @ states[-1]], np.float32))

    return head


def _rows(layer: Any, ids: Sequence[int]) -> mx.array:
    """Return these rows of a linear layer or embedding, quantized or not."""
    numbers = mx.array(ids)
    if "scales" not in layer:
        rows: mx.array = layer.weight[numbers]
        return rows
    biases = layer.get("biases")
    return mx.dequantize(
        layer.weight[numbers],
        layer.scales[numbers],
        None if biases is None else biases[numbers],
        group_size=layer.group_size,
        bits=layer.bits,
        mode=layer.mode,
    )


def _sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x.astype(np.float64))), np.float32)


def _gelu(x: Array) -> Array:
    return np.asarray(mx.array(x) * (1 + mx.erf(mx.array(x) / 2**0.5)) / 2)


def _array(x: mx.array) -> Array:
    return np.array(x.astype(mx.float32))
