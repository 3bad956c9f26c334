"""The model's own head for multi-token prediction, if speculation uses it."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache

from engine import device
from engine.cache.layout import PROBE_TOKENS, AttentionLayout, UnsupportedLayout, layout_of
from engine.executor.base import Executor
from engine.executor.batched import BatchedExecutor
from engine.model.fingerprint import digest
from engine.model.load import LoadedModel
from engine.mtp.head import MTPHead, embed
from engine.mtp.weights import HeadUnusable, head_files, load_head
from engine.plan import page_tokens
from shared.settings import Settings

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ServedHead:
    """A head, and the executor that uses it."""

    executor: BatchedExecutor
    nbytes: int  # of its weights
    fingerprint: str  # identifies its weights, because pages contain its keys and values too


def with_head(
    executor: Executor, loaded: LoadedModel, settings: Settings, memory_bytes: int
) -> ServedHead | None:
    """Return a replacement for the proven ``executor`` if ``loaded`` has a head and ``settings``
    enable its drafts. Log the reason if that is not possible."""
    if settings.spec_decode != "auto" or not (files := head_files(loaded.model, loaded.path)):
        return None
    try:
        if not isinstance(executor, BatchedExecutor) or not executor.batch_class.runs_model:
            raise HeadUnusable(f"requests are computed {executor.spec.batching}")
        head = load_head(loaded.model, files)
        if embed(loaded.model, mx.zeros((1, 1), mx.int32)).dtype == mx.float32:
            head.set_dtype(mx.float32)  # the model may have been widened
        layers = device.move_layers(head, settings.cpu_precision, memory_bytes)
        layer = _probed(loaded.model, head)
        if layer not in executor.layout.layers:
            raise HeadUnusable("its layer has another kind of keys and values than the model's")
    except (HeadUnusable, UnsupportedLayout) as reason:
        logger.warning("ignored the model's head for multi-token prediction: %s", reason)
        return None
    if layers is not None:
        layers.keep_packed()
    nbytes = sum(weight.nbytes for _, weight in tree_flatten(head.parameters()))
    nbytes += 0 if layers is None else layers.nbytes
    logger.info("drafts come from the model's own head too: %.2f GB of weights", nbytes / 1e9)
    page = page_tokens(settings.block_size)
    layout, batch_class = executor.layout.with_layer(layer), executor.batch_class
    return ServedHead(
        executor=BatchedExecutor(loaded.model, layout, page, batch_class, head),
        nbytes=nbytes,
        fingerprint=digest(loaded.path / "config.json", files),
    )


def _probed(model: Any, head: MTPHead) -> AttentionLayout:
    """Return what the layer of ``head`` keeps, found by running a few tokens through it."""
    cache = KVCache()
    for count in PROBE_TOKENS:
        embedded = embed(model, mx.zeros((1, count), mx.int32))
        mx.eval(head(embedded, mx.zeros_like(embedded), cache))
    return layout_of(cache, "the head")
