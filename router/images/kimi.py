"""Pictures for Kimi-VL, in NumPy: mlx-vlm's own processor computes them in MLX, pixel by pixel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # not at run time: see `router.images.processor`
    import numpy as np
    from PIL.Image import Image


class KimiProcessor:
    """Replaces mlx-vlm's processor for Kimi-VL, except for its resizing."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self.tokenizer = call.tokenizer

    def __call__(self, text: Sequence[str], images: Sequence[Image]) -> dict[str, Any]:
        """Return the tokens of one ``text``, and the arrays of its ``images``."""
        import numpy as np

        rows, columns = self._call.image_processor.merge_kernel_size
        patches, grids = zip(*(self._patches(image) for image in images), strict=True)
        counts = iter(grid[0] * grid[1] // (rows * columns) for grid in grids)
        first, *rest = text[0].split(self._call.image_token)
        whole = first + "".join(self._call.image_token * next(counts) + part for part in rest)
        return {
            "input_ids": self.tokenizer.encode(whole),
            "pixel_values": np.concatenate(patches),
            "image_grid_hws": np.array(grids, np.int64),
        }

    def _patches(self, image: Image) -> tuple[np.ndarray[Any, Any], tuple[int, int]]:
        """Return the patches (patches, channels, rows, columns) of ``image``, and its grid."""
        import numpy as np

        its = self._call.image_processor
        pixels = np.asarray(its.rescale(image).convert("RGB"), np.float32) / np.float32(255)
        mean, std = (np.array(values, np.float32) for values in (its.image_mean, its.image_std))
        size, (height, width, _) = its.patch_size, pixels.shape
        grid = height // size, width // size
        if not all(grid):
            raise ValueError("the picture is smaller than the model's patches")
        cut = ((pixels - mean) / std).reshape(grid[0], size, grid[1], size, 3)
        return cut.transpose(0, 2, 4, 1, 3).reshape(-1, 3, size, size), grid
