"""Loads an embedding or reranking model."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten, tree_map

from engine import device
from engine.backend.device_errors import compute
from engine.embedding.checkpoint import TextCheckpoint, read_checkpoint
from engine.embedding.heads import (
    Head,
    HeadedModel,
    StatesModel,
    classifier_head,
    embedding_head,
    yes_no_head,
)
from engine.embedding.padded import padded_decoder, padded_encoder
from engine.model.encoder import load_encoder
from engine.model.errors import ModelUnavailable
from engine.model.load import LOAD_ERRORS, fingerprint
from engine.model.rotation import older_names
from shared.model_config import config_int
from shared.safetensors_header import read_header
from shared.settings import CPUPrecision
from shared.wire import TOKENIZER_FILES, Task, TextTask

logger = logging.getLogger(__name__)

PAIR_TEMPLATE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
"""The prompt with which Qwen3-Reranker was trained, from its model card."""


@dataclass(frozen=True, kw_only=True)
class LoadedTextModel:
    """A loaded embedding or reranking model, and its properties for the engine."""

    model: HeadedModel
    task: TextTask
    fingerprint: str
    max_tokens: int
    vocab_size: int
    tokenizer_files: dict[str, Path]


def load_text_model(
    path: Path, task: Task, *, cpu_precision: CPUPrecision, memory_bytes: int
) -> LoadedTextModel:
    """Load the model in ``path``. Raises `ModelUnavailable` if it does not support this
    ``task``."""
    checkpoint = read_checkpoint(path)
    if checkpoint.is_encoder:
        body, head, dimensions, vocab_size = _encoder(checkpoint, task)
    else:
        body, head, dimensions, vocab_size = _decoder(checkpoint, task, cpu_precision, memory_bytes)
    ranks_by_prompt = task == "rerank" and not checkpoint.is_encoder
    mx.clear_cache()
    return LoadedTextModel(
        model=HeadedModel(body, head, vocab_size=vocab_size, max_tokens=checkpoint.max_tokens),
        task=TextTask(
            dimensions=dimensions,
            prompts=dict(checkpoint.prompts) if task == "embed" else {},
            default_prompt=checkpoint.default_prompt if task == "embed" else None,
            pair_template=PAIR_TEMPLATE if ranks_by_prompt else "",
            instruction=INSTRUCTION if ranks_by_prompt else "",
        ),
        fingerprint=f"{fingerprint(path)}{checkpoint.fingerprint}{task}",
        max_tokens=checkpoint.max_tokens,
        vocab_size=vocab_size,
        tokenizer_files={name: path / name for name in TOKENIZER_FILES if (path / name).is_file()},
    )


def _encoder(checkpoint: TextCheckpoint, task: Task) -> tuple[StatesModel, Head, int, int]:
    dtype = mx.float32 if mx.default_device() == mx.cpu else None
    encoder = load_encoder(checkpoint.path, checkpoint.config, dtype)
    if task == "rerank":
        head, size = classifier_head(checkpoint.model_type, checkpoint.config, encoder.rest), 0
    else:
        head, size = embedding_head(checkpoint, encoder.hidden)
    body: StatesModel = device.packed_encoder(encoder) or padded_encoder(encoder)
    return body, head, size, int(encoder.word.shape[0])


def _decoder(
    checkpoint: TextCheckpoint, task: Task, precision: CPUPrecision, memory_bytes: int
) -> tuple[StatesModel, Head, int, int]:
    model = _load_decoder(checkpoint)
    if device.uses_host():
        _widen(model)
    device.move_layers(model, precision, memory_bytes)
    if (hidden := int(getattr(model.args, "hidden_size", 0))) <= 0:  # in a part of the config
        raise ModelUnavailable(f"the model in {checkpoint.path} is not supported for {task}")
    if task == "rerank":
        head, size = yes_no_head(model, checkpoint.path), 0
    else:
        head, size = embedding_head(checkpoint, hidden)
    vocab_size = config_int(checkpoint.config, "vocab_size")
    body: StatesModel | None = device.packed_decoder(model, causal=checkpoint.causal)
    if body is None:
        if not hasattr(model, "model"):
            raise ModelUnavailable(
                f"{checkpoint.model_type} is not supported as an embedding or reranking model"
            )
        body = padded_decoder(model, causal=checkpoint.causal)
    return body, head, size, vocab_size


def _load_decoder(checkpoint: TextCheckpoint) -> Any:
    """Load a decoder of mlx-lm, also one without the layer that makes logits."""
    from mlx_lm.utils import _get_classes, load_config, load_model

    files = sorted(checkpoint.path.glob("model*.safetensors"))
    names = {name for file in files for name in read_header(file)[1]}
    headless = not any("lm_head" in name for name in names)

    def classes(config: dict[str, Any]) -> tuple[type[nn.Module], type]:
        theirs, args = _get_classes(config)

        class Renamed(theirs):  # type: ignore[misc, valid-type]
            __module__ = theirs.__module__

            def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
                weights = _prefixed(weights)
                sanitize = getattr(super(), "sanitize", None)
                return weights if sanitize is None else dict(sanitize(weights))

        return Renamed, args

    try:
        model, _ = load_model(
            checkpoint.path,
            model_config=older_names(load_config(checkpoint.path))
            | ({"tie_word_embeddings": True} if headless else {}),
            get_model_classes=classes,
        )
    except LOAD_ERRORS as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ModelUnavailable(f"cannot load the model in {checkpoint.path}: {reason}") from error
    compute(model)  # also constants: if the first pass computed them and failed, they stay wrong
    return model


def _prefixed(weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Return ``weights`` under mlx-lm's names: checkpoints without a head omit a prefix."""
    if any(name.startswith(("model.", "language_model.")) for name in weights):
        return dict(weights)
    return {
        name if name.startswith("lm_head") else f"model.{name}": weight
        for name, weight in weights.items()
    }


def _widen(model: nn.Module) -> None:
    """Convert unquantized 16-bit weights to fp32, because a CPU has no fast products with them."""
    if any("scales" in name for name, _ in tree_flatten(model.parameters())):
        return  # `device.move_layers` widens existing weights
    model.update(
        tree_map(
            lambda w: w.astype(mx.float32) if mx.issubdtype(w.dtype, mx.floating) else w,
            model.parameters(),
        )
    )
    mx.eval(model.parameters())
