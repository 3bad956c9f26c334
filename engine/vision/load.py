"""Loads the picture encoder of a checkpoint, through mlx-vlm."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from engine.backend.device_errors import compute
from engine.batch.axes import axes_of_pairs
from engine.model.load import LOAD_ERRORS, LoadedModel
from engine.model.multimodal import (
    FAMILIES,
    Family,
    attends_both_ways,
    deep_layers,
    takes_pictures,
)
from engine.vision.encoder import VisionEncoder
from engine.vision.pixels import PixelStore, ScoreLimit
from shared.imports.bare_package import leave_out_code_of
from shared.wire import Vision

logger = logging.getLogger(__name__)


PIXELS = 2
"""Max memory for the picture arrays of all requests, as a multiple of the room for embeddings:
patches of pixels in fp32 are about as large as their embeddings."""
SCORE_BYTES = 2 * 4
"""Memory of one attention score on a CPU: the score and its softmax, in fp32."""
MAX_CHARACTERS = 300
"""Max length of a reason: some list every weight of a checkpoint."""


class VisionUnusable(Exception):
    """Pictures cannot be served. The text gives the reason in one line."""


@dataclass(frozen=True)
class ServedVision:
    """A model's picture encoder, and its description for routers."""

    encoder: VisionEncoder
    vision: Vision
    weight_bytes: int
    room_bytes: int  # for cached embeddings
    scores_bytes: int  # that the attention of a tower's layer may take for a moment
    pixels: PixelStore  # arrays of pictures, received with requests

    @property
    def bytes(self) -> int:
        """Memory that is kept for pictures, in addition to keys and values."""
        return self.weight_bytes + (1 + PIXELS) * self.room_bytes

    @property
    def has_axes(self) -> bool:
        return bool(self.encoder.axes_of_pairs)

    @property
    def embedding_bytes(self) -> int:
        return int(self.encoder.hidden * (1 + self.encoder.deep_layers) * self.encoder.dtype.size)


def open_vision(
    loaded: LoadedModel, embedded: mx.array, room_bytes: int, scores_bytes: int, *, widen: bool
) -> ServedVision | None:
    """Return the picture encoder for ``loaded``, if it belongs to one of the `FAMILIES`. None if
    the model takes no pictures; a failure is logged. ``embedded``: embeddings of tokens in the
    language model. ``room_bytes``: see `ServedVision`. ``scores_bytes`` limit the attention of
    pictures of any size; 0: the device stores no scores. With ``widen`` weights are in fp32, for
    CPUs, on which 16 bits are slow."""
    if not takes_pictures(loaded.config):
        return None
    try:
        served = _opened(loaded, embedded, room_bytes, scores_bytes, widen=widen)
    except VisionUnusable as reason:
        logger.warning("the model is served without pictures: %s", reason)
        return None
    logger.info(
        "pictures are encoded in %d layers, with %.2f GB of weights",
        served.encoder.layers,
        served.weight_bytes / 1e9,
    )
    return served


def _opened(
    loaded: LoadedModel, embedded: mx.array, room_bytes: int, scores_bytes: int, *, widen: bool
) -> ServedVision:
    model_type = str(loaded.config.get("model_type"))
    family = FAMILIES[model_type]
    # Its package would import everything for generation and conversion.
    if not leave_out_code_of("mlx_vlm"):
        raise VisionUnusable("mlx-vlm is missing: install the extra 'vision'")
    try:
        from mlx_vlm.utils import load_model

        model = load_model(loaded.path, lazy=True)
    except LOAD_ERRORS as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise VisionUnusable(why[:MAX_CHARACTERS]) from error
    vision = _vision(model, loaded, family)
    encoder = VisionEncoder(model, vision.image_token_id, embedded.shape[-1], embedded.dtype)
    merge, limit, tower = 0, None, model.config.vision_config
    if family.has_axes:
        sections = _sections(loaded.config)
        encoder.axes_of_pairs = axes_of_pairs(sections, interleaved=family.interleaved)
        merge = int(tower.spatial_merge_size)
    if scores_bytes and (family.has_axes or family.any_size):
        heads = tower.num_heads if family.has_axes else tower.num_attention_heads
        limit = ScoreLimit(int(tower.patch_size), int(heads) * SCORE_BYTES, scores_bytes)
    encoder.deep_layers = deep_layers(loaded.config)
    encoder.attends_both_ways = attends_both_ways(loaded.config)
    if family.unscaled:
        language = getattr(loaded.model, "language_model", loaded.model)
        encoder.unscaled = float(language.model.embed_scale)
    for name in ("audio_tower", "embed_audio"):  # not used here
        setattr(model, name, None)
    if widen:
        model.set_dtype(mx.float32)
        encoder.use_host()
    compute(model)
    nbytes = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    pixels = PixelStore(PIXELS * room_bytes, merge, limit)
    at_once = 0 if limit is None else scores_bytes
    return ServedVision(encoder, vision, nbytes, room_bytes, at_once, pixels)


def _sections(config: dict[str, Any]) -> list[int]:
    """Return the number of rotated pairs of a head for each axis."""
    text = config.get("text_config") or {}
    for part in (text, config):
        for name in ("rope_scaling", "rope_parameters"):
            found = (part.get(name) or {}).get("mrope_section")
            if isinstance(found, list) and len(found) == 3:
                return found
    raise VisionUnusable("its configuration has no sections of positions")


def _vision(model: Any, loaded: LoadedModel, family: Family) -> Vision:
    names = ("image_token_index", "image_token_id")
    # mlx-vlm's configurations have both fields. The one missing in the checkpoint is a default.
    found = [loaded.config.get(name) for name in names]
    found += [getattr(model.config, name, None) for name in names]
    image_token_id = next((token for token in found if isinstance(token, int)), None)
    placeholder_id = loaded.tokenizer.convert_tokens_to_ids(family.placeholder)
    if image_token_id is None or not isinstance(placeholder_id, int):
        raise VisionUnusable(f"its tokenizer has no {family.placeholder}")
    return Vision(
        model_type=str(loaded.config.get("model_type")),
        placeholder=family.placeholder,
        placeholder_id=placeholder_id,
        image_token_id=image_token_id,
        before=family.around,
        after=family.around,
    )
