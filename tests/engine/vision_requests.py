"""Requests with pictures, and what mlx-vlm itself makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from PIL import Image

from router.images.processor import load_processor
from shared.wire import ImagePart, Vision
from tests.vision_models import FAMILIES


@dataclass(frozen=True)
class Request:
    """A prompt whose pictures are expanded, as a router sends it."""

    text: str
    pictures: tuple[Image.Image, ...]
    token_ids: list[int]
    images: tuple[ImagePart, ...]
    frames: tuple[bytes, ...]

    @property
    def fields(self) -> dict[str, Any]:
        return {"images": self.images, "frames": self.frames} if self.images else {}


class VisionOracle:
    """A model as mlx-vlm computes it."""

    def __init__(self, path: Path, vision: Vision) -> None:
        from mlx_vlm.utils import load_model

        self._around = FAMILIES[vision.model_type].around

        self._vision = vision
        self._model = load_model(path)
        self._processor = load_processor(path, vision)

    def request(self, text: str, *pictures: Image.Image) -> Request:
        """Return the request for ``text``, in which each ``<>`` stands for the next of
        ``pictures``."""
        vision, tokenizer = self._vision, self._processor._call.tokenizer
        text = text.replace("<>", vision.placeholder.join(self._around))
        shown = vision.before + vision.placeholder + vision.after
        token_ids: list[int] = []
        images: list[ImagePart] = []
        frames: list[bytes] = []
        left = list(pictures)
        for token in tokenizer(text.replace(vision.placeholder, shown))["input_ids"]:
            if token != self._vision.placeholder_id:
                token_ids.append(token)
                continue
            prepared = self._processor.prepare(left.pop(0))
            known = {image.digest for image in images}
            specs = () if prepared.digest in known else prepared.specs
            if specs:
                frames += [bytes(frame) for frame in prepared.frames]
            length = len(prepared.expansion)
            images.append(
                ImagePart(digest=prepared.digest, start=len(token_ids), length=length, arrays=specs)
            )
            token_ids += prepared.expansion
        return Request(text, pictures, token_ids, tuple(images), tuple(frames))

    def logprobs(self, request: Request, answer: Sequence[int]) -> np.ndarray[Any, Any]:
        """Return mlx-vlm's own log-probabilities (answer, vocabulary) of each token of
        ``answer``, in one pass over all of it."""
        given: dict[str, Any] = {}
        if request.pictures:
            found = self._processor._call(text=[request.text], images=list(request.pictures))
            given = {k: v for k, v in found.items() if k not in ("input_ids", "attention_mask")}
            assert _ids(found["input_ids"]) == request.token_ids
        given = {name: _arrays(value) for name, value in given.items()}
        ids = mx.array([[*request.token_ids, *answer[:-1]]])
        embedded = self._model.get_input_embeddings(
            ids, given.pop("pixel_values", None), mask=mx.ones_like(ids), **given
        )
        names = ("position_ids", "visual_pos_masks", "deepstack_visual_embeds", "per_layer_inputs")
        found = {name: getattr(embedded, name) for name in names}
        more = {name: value for name, value in found.items() if value is not None}
        if self._vision.model_type == "gemma4":
            more["mm_token_type_ids"] = (ids == self._vision.image_token_id).astype(mx.int32)
        logits = self._model.language_model(
            ids, inputs_embeds=embedded.inputs_embeds, **more
        ).logits[0]
        logits = logits[len(request.token_ids) - 1 :].astype(mx.float32)
        return np.asarray(logits - mx.logsumexp(logits, -1, keepdims=True))


def _arrays(value: Any) -> Any:
    """Return ``value`` as mlx-vlm's models take it: a list where pictures have several sizes."""
    try:
        return mx.array(np.asarray(value))
    except ValueError:
        return [mx.array(each) for each in value]


def _ids(found: Any) -> list[int]:
    ids = found.tolist() if hasattr(found, "tolist") else found
    return ids[0] if isinstance(ids[0], list) else ids
