"""The parts of a replica that serve pictures."""

from __future__ import annotations

import logging
from dataclasses import replace

import mlx.core as mx

from engine import device
from engine.batch.axes import take_axes
from engine.batch.given import take_embeddings, take_features
from engine.batch.ragged import embedding_of
from engine.executor.base import Executor
from engine.executor.batched import BatchedExecutor
from engine.executor.pictures import PictureEmbeddings
from engine.model.load import LoadedModel
from engine.model.multimodal import attends_both_ways, serves_pictures, takes_pictures
from engine.replica.head import ServedHead
from engine.replica.memory import HEADROOM_BYTES
from engine.scheduler import SchedulerConfig
from engine.vision.load import ServedVision, open_vision
from shared.settings import Settings

logger = logging.getLogger(__name__)

MAX_BYTES = 512 << 20
"""Max size of cached embeddings."""
MAX_SHARE = 1 / 16
"""The same as a fraction of the engine's memory."""
SCORES_SHARE = 1 / 8
"""Max attention scores of a tower's layer on a CPU, as a fraction of the engine's memory. They are
as many as the square of a picture's patches."""
LEAST_SCORES = HEADROOM_BYTES // 2
"""The same with little memory."""


def vision_bytes(served: ServedVision | None) -> int:
    """Return the memory for pictures in addition to that for keys and values, and to that which is
    left for each step."""
    if served is None:
        return 0
    return served.bytes + max(0, served.scores_bytes - HEADROOM_BYTES)


def with_pictures(config: SchedulerConfig, served: ServedVision | None) -> SchedulerConfig:
    """Return ``config`` with the scheduler's settings for pictures."""
    if served is None:
        return config
    max_tokens = 0
    if served.encoder.attends_both_ways:
        chunk_tokens = config.prefill_chunk_tokens or config.max_chunk_tokens
        max_tokens = max(chunk_tokens, config.max_chunk_tokens)
    return replace(
        config,
        whole_picture_tokens=max_tokens,
        image_token_id=served.vision.image_token_id,
        picture_token_bytes=served.embedding_bytes,
        picture_layers=served.encoder.layers,
        picture_bytes=served.room_bytes,
    )


def served_vision(
    executor: Executor,
    loaded: LoadedModel,
    settings: Settings,
    memory_bytes: int,
    head: ServedHead | None,
) -> ServedVision | None:
    """Enable pictures in ``executor``, if ``loaded`` can encode them; log the reason if that
    fails. Return the encoder."""
    if not takes_pictures(loaded.config):
        return None
    reason, model_type = "", str(loaded.config.get("model_type"))
    if not serves_pictures(loaded.config):  # its embeddings may be in any place
        reason = f"those of {model_type} are not supported yet"
    elif settings.ranks > 1:
        reason = "its layers are divided between ranks"
    elif not isinstance(executor, BatchedExecutor):
        reason = f"requests are computed {executor.spec.batching}"
    elif attends_both_ways(loaded.config) and not executor.batch_class.attends_both_ways():
        reason = "its pictures are attended to both ways, which this way of computing cannot"
    elif head is not None:
        reason = "drafts come from its own head, which takes none (--spec-decode)"
    if reason or not isinstance(executor, BatchedExecutor):
        logger.warning("the model is served without pictures: %s", reason)
        return None
    embedded = embedding_of(loaded.model)(mx.zeros((1, 1), mx.int32))
    room_bytes = min(MAX_BYTES, int(memory_bytes * MAX_SHARE))
    on_cpu = mx.default_device() == mx.cpu
    scores_bytes = max(LEAST_SCORES, int(memory_bytes * SCORES_SHARE)) if on_cpu else 0
    widen = device.uses_host()
    served = open_vision(loaded, embedded, room_bytes, scores_bytes, widen=widen)
    if served is None:
        return None
    if served.has_axes:
        try:
            take_axes(loaded.model, len(served.encoder.axes_of_pairs))
        except ValueError as error:
            logger.warning("the model is served without pictures: %s", error)
            return None
    take_embeddings(loaded.model)
    take_features(loaded.model, served.encoder.deep_layers)
    packs_rows = executor.batch_class.packs_rows
    executor.use_pictures(PictureEmbeddings(served.encoder, served.pixels, packs_rows=packs_rows))
    return served
