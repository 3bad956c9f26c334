"""Embeddings of pictures, computed, used and dropped as plans say."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from engine.batch.axes import Axes
from engine.batch.given import Given
from engine.plan import Chunk, EncodePicture, Plan
from engine.vision.encoder import EncoderPass, VisionEncoder
from engine.vision.pixels import Pixels, PixelStore


class PictureUnusable(Exception):
    """A picture has no embeddings."""


class PictureEmbeddings:
    """The embeddings of pictures in an executor. Plans decide what happens to them."""

    def __init__(
        self, encoder: VisionEncoder, pixels: PixelStore, *, packs_rows: bool = False
    ) -> None:
        """``packs_rows``: as in `RaggedBatch`."""
        self._encoder, self._pixels = encoder, pixels
        self.joins_rows = packs_rows and not encoder.attends_both_ways
        """Whether chunks with pictures may share a pass."""
        self._begun: dict[bytes, EncoderPass] = {}
        self._done: dict[bytes, mx.array] = {}

    def clear(self) -> None:
        for begun in self._begun.values():
            begun.close()  # its stack holds a reference that the garbage collector cannot find
        self._begun.clear()
        self._done.clear()

    def drop(self, plan: Plan) -> None:
        """Drop the embeddings that ``plan`` names."""
        for digest in plan.dropped_pictures:
            self._done.pop(digest, None)
            if (begun := self._begun.pop(digest, None)) is not None:
                begun.close()

    def encode(self, op: EncodePicture) -> list[mx.array]:
        """Build the graph of a part of a picture's embeddings. Return the arrays to evaluate.

        Raises: `PictureUnusable` if the picture is gone, and anything that the encoder does."""
        try:
            begun = self._begun.get(op.digest)
            if begun is None:
                pixels = self._pixels.find(op.digest)
                if pixels is None:
                    raise PictureUnusable("the picture is no longer in memory")
                begun = self._encoder.begin(op.token_ids, _arrays(pixels))
                self._begun[op.digest] = begun
            found = begun.advance(None if op.is_last else op.layers)
            if op.is_last:
                del self._begun[op.digest]
                self._done[op.digest] = found[0]
            return found
        except BaseException:
            if (failed := self._begun.pop(op.digest, None)) is not None:
                failed.close()
            raise

    def of(self, chunk: Chunk) -> Given:
        """Return the embeddings that replace tokens of ``chunk``.

        Raises: `PictureUnusable` if one is missing."""
        places: list[int] = []
        parts: list[mx.array] = []
        spans: list[tuple[int, int]] = []
        for part in chunk.pictures:
            whole = self._done.get(part.digest)
            if whole is None:
                raise PictureUnusable("a picture of the prompt could not be encoded")
            places += part.places
            parts.append(whole[part.first : part.first + len(part.places)])
            spans.append((chunk.start + part.places[0], chunk.start + part.places[-1] + 1))
        axes = Axes(np.array(chunk.axes), self._encoder.axes_of_pairs) if chunk.axes else None
        whole = parts[0] if len(parts) == 1 else mx.concatenate(parts)
        embeddings, *deep = mx.split(whole, self._encoder.deep_layers + 1, axis=-1)
        of_spans = tuple(spans) if self._encoder.attends_both_ways else ()
        return Given(places, embeddings, axes, tuple(deep), of_spans)


def _arrays(pixels: Pixels) -> dict[str, mx.array]:
    return {
        spec.name: mx.array(np.frombuffer(frame, np.dtype(spec.dtype)).reshape(spec.shape))
        for spec, frame in pixels
    }
