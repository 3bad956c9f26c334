"""Prepares a picture for a model's vision encoder, with mlx-vlm's processor for the model.

Everything here runs in a process that decodes pictures, never in the router itself: processors
import transformers and MLX, although they do not compute with them here."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from router.images.kimi import KimiProcessor
from shared.imports.bare_package import leave_out_code_of
from shared.wire import PROCESSOR_FILES, ArraySpec, Vision

if TYPE_CHECKING:  # not at run time: see above
    import numpy as np
    from PIL.Image import Image

_LIBRARIES = ("mlx-vlm", "transformers", "pillow")
_OF_TEXT = frozenset({"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"})


class ProcessorUnusable(Exception):
    """The model's processor cannot be used here. The text gives the reason in one line."""


class ImageUnusable(Exception):
    """The processor does not accept this picture. The text gives the reason in one line."""


@dataclass(frozen=True)
class PreparedImage:
    """A picture prepared for the engine."""

    digest: bytes  # of the pixels and everything else that determines `arrays` (see `ImagePart`)
    expansion: list[int]  # the token ids that replace the placeholder in the prompt
    arrays: dict[str, np.ndarray[Any, Any]]  # inputs of the vision encoder, by name

    @property
    def specs(self) -> tuple[ArraySpec, ...]:
        return tuple(
            msgspec.convert(
                {"name": name, "dtype": array.dtype.name, "shape": array.shape}, ArraySpec
            )
            for name, array in self.arrays.items()
        )

    @property
    def frames(self) -> list[memoryview]:
        """The bytes of each array, in the order of `specs`."""
        return [array.data.cast("B") for array in self.arrays.values()]


class Processor:
    """The processor of one model. Raises what `load_processor` raises."""

    def __init__(self, folder: Path, vision: Vision) -> None:
        self._vision = vision
        self.identity = _identity(folder, vision.model_type)
        """A digest of the files and libraries that determine the result."""
        _import_package(vision.model_type)
        from transformers import AutoProcessor

        self._call: Any = AutoProcessor.from_pretrained(str(folder))
        if vision.model_type == "kimi_vl":
            self._call = KimiProcessor(self._call)
        text = vision.before + vision.placeholder + vision.after
        plain = self._ids(self._call.tokenizer(text)["input_ids"])
        if plain.count(vision.placeholder_id) != 1:
            raise ProcessorUnusable(f"{vision.placeholder} is not one token of its tokenizer")
        # Tokens that the processor and the tokenizer put around each picture.
        self._before = plain.index(vision.placeholder_id)
        self._after = len(plain) - self._before - 1

    def prepare(self, image: Image) -> PreparedImage:
        """Return the upright RGB ``image``, prepared for the model.

        Raises: `ImageUnusable` if the processor rejects it, for example because it is too
        narrow."""
        import numpy as np

        if not image.width or not image.height:
            raise ImageUnusable("it has no pixels")
        try:
            found = dict(self._call(text=[self._vision.placeholder], images=[image]))
            ids = self._ids(found["input_ids"])
            arrays = {
                name: _compact(name, np.asarray(value))
                for name, value in found.items()
                if name not in _OF_TEXT
            }
            digest = blake2b(self.identity, digest_size=32)
            digest.update(repr(image.size).encode() + image.tobytes())
        except Exception as error:  # third-party code may raise anything for unexpected input
            raise ImageUnusable(_one_line(error)) from error
        expansion = ids[self._before : len(ids) - self._after]
        if self._vision.image_token_id not in expansion:
            raise ImageUnusable("its processor left no place for it in the prompt")
        return PreparedImage(digest.digest(), expansion, arrays)

    @staticmethod
    def _ids(found: Any) -> list[int]:
        """Return the ids of one text, also if they are the only row of a batch."""
        ids = found.tolist() if hasattr(found, "tolist") else list(found)
        return ids[0] if ids and isinstance(ids[0], list) else ids


def load_processor(folder: Path, vision: Vision) -> Processor:
    """Return the processor of the model described by ``vision``, from its files in ``folder``
    (`TOKENIZER_FILES`).

    Raises: `ProcessorUnusable` if mlx-vlm is missing or does not accept the files."""
    try:
        return Processor(folder, vision)
    except ProcessorUnusable:
        raise
    except Exception as error:  # third-party code
        raise ProcessorUnusable(_one_line(error)) from error


def _identity(folder: Path, model_type: str) -> bytes:
    digest = blake2b(digest_size=32)
    try:
        parts = [f"{name} {version(name)}".encode() for name in _LIBRARIES]
    except ImportError as error:
        raise ProcessorUnusable(
            f"{error.name} is not installed here: install the extra 'vision'"
        ) from error
    names = ("config.json", *PROCESSOR_FILES)
    parts += [(folder / name).read_bytes() for name in names if (folder / name).is_file()]
    for part in (model_type.encode(), *parts):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


def _import_package(model_type: str) -> None:
    """Import mlx-vlm's package for ``model_type``, which registers its processor with
    transformers.

    mlx-vlm's own code for generating, converting and serving is not imported, and arrays remain
    NumPy's."""
    if not model_type.isidentifier():
        raise ProcessorUnusable(f"no processor is known for {model_type!r}")
    if not leave_out_code_of("mlx_vlm"):
        raise ProcessorUnusable("mlx-vlm is not installed: install the extra 'vision'")
    base = importlib.import_module("mlx_vlm.models.base")
    base.to_mlx = dict  # type: ignore[attr-defined]
    importlib.import_module(f"mlx_vlm.models.{model_type}")


def _compact(name: str, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return ``array``, contiguous and in the smallest type that keeps its values."""
    import numpy as np

    if name.endswith("_mask"):
        array = array.astype(np.bool_)
    elif array.dtype == np.float64:
        array = array.astype(np.float32)
    return np.ascontiguousarray(array)


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
