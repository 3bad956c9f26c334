from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from PIL import Image

from router.images.processor import ImageUnusable, ProcessorUnusable, load_processor
from shared.wire import Vision
from tests.tiny_models import VOCAB_SIZE
from tests.vision_models import make_vision_model, needs_mlx_vlm

needs_mlx_vlm()

VISION = Vision(
    model_type="idefics3",
    placeholder="<image>",
    placeholder_id=VOCAB_SIZE,
    image_token_id=VOCAB_SIZE,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_model("idefics3", tmp_path_factory.mktemp("models") / "idefics3")


def plain(width: int, height: int, colour: str = "red") -> Image.Image:
    return Image.new("RGB", (width, height), colour)


def test_a_picture_becomes_tokens_and_arrays(folder: Path) -> None:
    prepared = load_processor(folder, VISION).prepare(plain(32, 16))
    # Two tiles of four embeddings, and one of the whole picture.
    assert prepared.expansion.count(VOCAB_SIZE) == 12
    assert prepared.expansion[0] != VOCAB_SIZE
    sizes = {spec.name: (spec.dtype, spec.shape) for spec in prepared.specs}
    assert sizes == {
        "pixel_values": ("float32", (1, 3, 3, 16, 16)),
        "pixel_attention_mask": ("bool", (1, 3, 16, 16)),
    }
    assert [len(frame) for frame in prepared.frames] == [spec.nbytes for spec in prepared.specs]


def test_the_digest_names_the_pixels_and_the_processor(folder: Path, tmp_path: Path) -> None:
    processor = load_processor(folder, VISION)
    red = processor.prepare(plain(32, 16)).digest
    assert red == load_processor(folder, VISION).prepare(plain(32, 16)).digest
    assert red != processor.prepare(plain(32, 16, "blue")).digest
    assert red != processor.prepare(plain(16, 32)).digest
    other = make_vision_model("idefics3", tmp_path / "other")
    path = other / "preprocessor_config.json"
    path.write_text(path.read_text().replace("0.5", "0.4"))
    assert red != load_processor(other, VISION).prepare(plain(32, 16)).digest


def test_the_bytes_that_a_tokenizer_puts_around_a_text_are_left_out(folder: Path) -> None:
    prepared = load_processor(folder, VISION).prepare(plain(16, 16))
    assert not {0, 1, 2} & set(prepared.expansion)


def test_a_picture_that_the_processor_does_not_take_is_refused_in_one_line(folder: Path) -> None:
    processor = load_processor(folder, VISION)
    with pytest.raises(ImageUnusable) as refused:
        processor.prepare(plain(0, 16))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "no_such_model"},
        {"model_type": "../secret"},
        {"placeholder": "two words"},
    ],
)
def test_a_model_without_a_processor_is_refused(folder: Path, changes: dict[str, str]) -> None:
    with pytest.raises(ProcessorUnusable):
        load_processor(folder, msgspec.structs.replace(VISION, **changes))


def test_files_that_are_no_processor_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ProcessorUnusable):
        load_processor(tmp_path, VISION)
