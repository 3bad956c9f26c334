"""Loads the parts of a checkpoint that encode pictures, through mlx-vlm."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

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
from engine.vision.pixels import PixelStore
from shared.imports.bare_package import leave_out_code_of
from shared.wire import Vision

logger = logging.getLogger(__name__)


PIXELS = 2
"""The arrays of pictures of all requests may take so many times the room of embeddings: patches of
pixels in fp32 are about as large as what is made of them."""


MOST_CHARACTERS = 300
"""Of a reason: some name every weight of a checkpoint."""


class VisionUnusable(Exception):
    """Pictures are not served. Its text says why, in one line."""


@dataclass(frozen=True)
class ServedVision:
    """What encodes pictures for a model, and what routers are told of it."""

    encoder: VisionEncoder
    vision: Vision
    weight_bytes: int
    room_bytes: int  # for embeddings that are kept
    pixels: PixelStore  # where pictures are that came with requests

    @property
    def bytes(self) -> int:
        """What pictures take beside keys and values."""
        return self.weight_bytes + (1 + PIXELS) * self.room_bytes

    @property
    def has_axes(self) -> bool:
        return bool(self.encoder.axes_of_pairs)

    @property
    def embedding_bytes(self) -> int:
        return int(self.encoder.hidden * (1 + self.encoder.deep_layers) * self.encoder.dtype.size)


def open_vision(
    loaded: LoadedModel, embedded: mx.array, room_bytes: int, *, widen: bool
) -> ServedVision | None:
    """Return what encodes pictures for ``loaded``, of one of the `FAMILIES`; None for a model that
    takes none. Log what hinders it otherwise.

    ``embedded`` are embeddings of tokens in the language model, ``room_bytes`` as in
    `ServedVision`. With ``widen`` weights are in
    fp32, as on a CPU, where 16 bits are slow."""
    if not takes_pictures(loaded.config):
        return None
    try:
        served = _opened(loaded, embedded, room_bytes, widen=widen)
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
    loaded: LoadedModel, embedded: mx.array, room_bytes: int, *, widen: bool
) -> ServedVision:
    model_type = str(loaded.config.get("model_type"))
    family = FAMILIES[model_type]
    # Its own code imports all that generates and converts.
    if not leave_out_code_of("mlx_vlm"):
        raise VisionUnusable("mlx-vlm is missing: pip install 'mlx-lm-server[vision]'")
    try:
        from mlx_vlm.utils import load_model

        model = load_model(loaded.path, lazy=True)
    except LOAD_ERRORS as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise VisionUnusable(why[:MOST_CHARACTERS]) from error
    vision = _vision(model, loaded, family)
    encoder = VisionEncoder(model, vision.image_token_id, embedded.shape[-1], embedded.dtype)
    merge = 0
    if family.has_axes:
        sections = _sections(loaded.config)
        encoder.axes_of_pairs = axes_of_pairs(sections, interleaved=family.interleaved)
        merge = int(model.config.vision_config.spatial_merge_size)
    encoder.deep_layers = deep_layers(loaded.config)
    encoder.attends_both_ways = attends_both_ways(loaded.config)
    if family.unscaled:
        language = getattr(loaded.model, "language_model", loaded.model)
        encoder.unscaled = float(language.model.embed_scale)
    for name in ("audio_tower", "embed_audio"):  # which nothing here uses
        setattr(model, name, None)
    if widen:
        model.set_dtype(mx.float32)
    mx.eval(model.parameters())
    nbytes = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    return ServedVision(encoder, vision, nbytes, room_bytes, PixelStore(PIXELS * room_bytes, merge))


def _sections(config: dict[str, Any]) -> list[int]:
    """Return how many pairs of a head turn by each axis."""
    text = config.get("text_config") or {}
    for part in (text, config):
        for name in ("rope_scaling", "rope_parameters"):
            found = (part.get(name) or {}).get("mrope_section")
            if isinstance(found, list) and len(found) == 3:
                return found
    raise VisionUnusable("its configuration has no sections of positions")


def _vision(model: Any, loaded: LoadedModel, family: Family) -> Vision:
    names = ("image_token_index", "image_token_id")
    # mlx-vlm's configurations have both, and the one that the checkpoint lacks is a default.
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
