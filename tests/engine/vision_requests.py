"""Engines that take pictures, their requests, and what mlx-vlm itself makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from PIL import Image

from router.images.processor import load_processor
from shared.wire import ImagePart, Vision
from tests.engine.whole import Whole
from tests.vision_models import FAMILIES, picture

TOKENS = 8
SIZE = 4
BLOCK_OF = {"block_size": SIZE, "no_ssd": True, "num_blocks": 800}


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


class Seeing:
    """An engine, and mlx-vlm beside it, on the same weights."""

    def __init__(self, path: Path, **settings: Any) -> None:
        self.whole = Whole(path, **{**BLOCK_OF, **settings})
        assert self.whole.replica.vision is not None
        self.serving = self.whole.replica.vision
        self.oracle = VisionOracle(path, self.serving.vision)
        scale = FAMILIES[self.serving.vision.model_type].scale
        one, wide, other = (
            picture(seed, scale * width, scale * 20) for seed, width in ((1, 30), (2, 50), (3, 30))
        )
        self.requests = {
            "text": self.oracle.request("hello there"),
            "one": self.oracle.request("what is <> this?", one),
            "two": self.oracle.request("first <> and <> then", wide, other),
            "twice": self.oracle.request("is <> the same as <>?", one, one),
        }
        self.alone = {name: self.bits(name) for name in self.requests}

    def renew(self, **changes: Any) -> None:
        self.whole.renew(self.whole.executor.spec.look_ahead, **changes)

    def bits(self, name: str) -> list[float]:
        """Return the scores of a request that an engine computes alone, from nothing."""
        self.renew()
        self.run(name)
        return self.scores(name)

    def start(self, *names: str) -> None:
        for name in names:
            self.submit(name, self.requests[name])

    def run(self, *names: str) -> None:
        self.start(*names)
        self.whole.run()

    def submit(self, name: str, request: Request, max_tokens: int = TOKENS, **fields: Any) -> None:
        given = {"logprobs": 3, **request.fields, **fields}
        self.whole.submit(name, request.token_ids, max_tokens, **given)

    def serve(self, name: str, request: Request, **fields: Any) -> None:
        self.submit(name, request, **fields)
        self.whole.run()

    def scores(self, name: str) -> list[float]:
        assert self.whole.ends[name].error is None, self.whole.ends[name].error
        return self.whole.scores(name)

    def assert_oracles(self, name: str, request: Request, allowed: float = 2e-5) -> None:
        """Show that each token was the best one of mlx-vlm's, or as good, with its score."""
        answer = self.whole.texts[name]
        expected = self.oracle.logprobs(request, answer)
        chosen = expected[np.arange(len(answer)), answer]
        assert np.abs(chosen - self.scores(name)).max() < allowed
        assert (expected.max(-1) - chosen).max() < allowed

    def assert_same(self, *names: str) -> None:
        """Show that answers have the bits that they have alone, where the engine promises that, and
        elsewhere about these scores."""
        for name in names:
            assert self.scores(name)[:TOKENS] == self.as_good_as(self.alone[name]), name

    def as_good_as(self, scores: list[float]) -> Any:
        return pytest.approx(scores, abs=0 if self.whole.executor.deterministic else 2e-5, rel=0)

    def cached(self, name: str) -> int:
        usage = self.whole.usage(name)
        return usage.cached_ram_tokens + usage.cached_ssd_tokens

    @property
    def encoded(self) -> int:
        return self.whole.scheduler.stats().encoded_images_total


def _arrays(value: Any) -> Any:
    """Return ``value`` as mlx-vlm's models take it: a list where pictures have several sizes."""
    try:
        return mx.array(np.asarray(value))
    except ValueError:
        return [mx.array(each) for each in value]


def _ids(found: Any) -> list[int]:
    ids = found.tolist() if hasattr(found, "tolist") else found
    return ids[0] if isinstance(ids[0], list) else ids
