from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from PIL import Image

from router.images.processor import ImageUnusable, ProcessorUnusable, load_processor
from router.schemas.conversation import ChatMessage, ContentPart
from router.schemas.images import ImageContent, ModelImage
from router.tokens.rendering import Renderer
from shared.wire import Vision
from tests.router.images.pictures import VISION
from tests.tiny_models import VOCAB_SIZE
from tests.vision_models import make_vision_model, needs_mlx_vlm, picture

needs_mlx_vlm()


def plain(width: int, height: int, colour: str = "red") -> Image.Image:
    return Image.new("RGB", (width, height), colour)


def test_a_picture_becomes_tokens_and_arrays(vision_dir: Path) -> None:
    prepared = load_processor(vision_dir, VISION).prepare(plain(32, 16))
    # Two tiles of four embeddings, and one of the whole picture.
    assert prepared.expansion.count(VOCAB_SIZE) == 12
    assert prepared.expansion[0] != VOCAB_SIZE
    sizes = {spec.name: (spec.dtype, spec.shape) for spec in prepared.specs}
    assert sizes == {
        "pixel_values": ("float32", (1, 3, 3, 16, 16)),
        "pixel_attention_mask": ("bool", (1, 3, 16, 16)),
    }
    assert [len(frame) for frame in prepared.frames] == [spec.nbytes for spec in prepared.specs]


def test_the_digest_names_the_pixels_and_the_processor(vision_dir: Path, tmp_path: Path) -> None:
    processor = load_processor(vision_dir, VISION)
    red = processor.prepare(plain(32, 16)).digest
    assert red == load_processor(vision_dir, VISION).prepare(plain(32, 16)).digest
    assert red != processor.prepare(plain(32, 16, "blue")).digest
    assert red != processor.prepare(plain(16, 32)).digest
    other = make_vision_model("idefics3", tmp_path / "other")
    path = other / "preprocessor_config.json"
    path.write_text(path.read_text().replace("0.5", "0.4"))
    assert red != load_processor(other, VISION).prepare(plain(32, 16)).digest


def test_the_bytes_that_a_tokenizer_puts_around_a_text_are_left_out(vision_dir: Path) -> None:
    prepared = load_processor(vision_dir, VISION).prepare(plain(16, 16))
    assert not {0, 1, 2} & set(prepared.expansion)


def test_a_picture_that_a_processor_does_not_take_is_refused_in_one_line(vision_dir: Path) -> None:
    processor = load_processor(vision_dir, VISION)
    with pytest.raises(ImageUnusable) as refused:
        processor.prepare(plain(0, 16))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "changes",
    [{"model_type": "no_such_model"}, {"model_type": "../secret"}, {"placeholder": "two words"}],
)
def test_a_model_without_a_processor_is_refused(vision_dir: Path, changes: dict[str, str]) -> None:
    with pytest.raises(ProcessorUnusable):
        load_processor(vision_dir, msgspec.structs.replace(VISION, **changes))


def test_files_that_are_no_processor_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ProcessorUnusable):
        load_processor(tmp_path, VISION)


def test_what_a_processor_puts_around_a_picture_is_left_to_the_prompt(tmp_path: Path) -> None:
    folder = make_vision_model("gemma3", tmp_path / "gemma3")
    tokens: dict[str, Any] = {"placeholder_id": VOCAB_SIZE, "image_token_id": VOCAB_SIZE + 1}
    tokens |= {"placeholder": "<start_of_image>", "before": "\n\n", "after": "\n\n"}
    vision = Vision(model_type="gemma3", **tokens)
    prepared = load_processor(folder, vision).prepare(plain(32, 16))
    assert prepared.expansion == [VOCAB_SIZE, *[VOCAB_SIZE + 1] * 16, VOCAB_SIZE + 2]

    options: dict[str, Any] = {"tokenizer_options": {}, "template_args": {}}
    renderer = asyncio.run(Renderer.load(folder, chat_template=None, vision=vision, **options))
    shown = ImageContent(type="image", image=ModelImage(bytes(32), prepared.expansion, (), ()))
    content = [ContentPart("text", "See\n"), shown, ContentPart("text", "here <start_of_image>")]
    rendered = renderer.render_chat([ChatMessage(role="user", content=content)], [], {})
    before, _, after = renderer.decode(rendered.token_ids).partition("<start_of_image>")
    assert before.endswith("See\n\n\n")
    assert after.startswith("<image_soft_token>" * 16 + "<end_of_image>\n\nhere <")
    (placed,) = rendered.images
    assert rendered.token_ids[placed.start :][: placed.length] == prepared.expansion
    assert rendered.token_ids.count(VOCAB_SIZE) == 1  # that of the text is none


def test_kimi_vls_pictures_are_those_of_mlx_vlms_processor(tmp_path: Path) -> None:
    folder = make_vision_model("kimi_vl", tmp_path / "kimi_vl")
    vision = msgspec.structs.replace(VISION, model_type="kimi_vl", placeholder="<|media_pad|>")
    processor = load_processor(folder, vision)
    shown = picture(1, 100, 70)
    prepared = processor.prepare(shown)
    theirs = processor._call._call(text=["<|media_pad|>"], images=[shown])
    for name in ("pixel_values", "image_grid_hws"):
        assert np.array_equal(prepared.arrays[name], np.array(theirs[name]))
    expected = np.array(theirs["input_ids"])[0].tolist()
    assert prepared.expansion == [token for token in expected if token == VOCAB_SIZE]
    with pytest.raises(ImageUnusable, match="smaller"):
        processor.prepare(picture(1, 20, 20))
