"""A tiny model that was trained for some seconds to name the colour of a picture.

Its weights are those of a random one (`tests.vision_models`) after `STEPS` steps of Adam on
pictures of one colour with noise, the question and the answers below. That takes about 3 seconds.
"""

from __future__ import annotations

import io
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn, optimizers
from mlx.utils import tree_flatten
from PIL import Image

from router.images.processor import load_processor
from shared.wire import Vision
from tests.tiny_models import EOS, VOCAB_SIZE
from tests.vision_models import make_vision_model

QUESTION = "Which colour?"
COLOURS = {
    "red": (210, 40, 40),
    "green": (40, 180, 60),
    "blue": (40, 60, 210),
    "yellow": (225, 215, 50),
    "black": (20, 20, 20),
}
STEPS, BATCH, RATE = 40, 5, 3e-3
_FAMILY, _PLACEHOLDER = "llava", "<image>"


def coloured(colour: str, seed: int) -> Image.Image:
    """Return a picture of about one ``colour``."""
    draw = np.random.default_rng(seed)
    size = draw.integers(16, 48, 2)
    noise = draw.normal(0, 25, (*size, 3)) + draw.normal(0, 12, 3)
    pixels = np.clip(np.array(COLOURS[colour]) + noise, 0, 255)
    return Image.fromarray(pixels.astype(np.uint8))


def in_png(colour: str, seed: int) -> bytes:
    """Return the file of a picture of about one ``colour``."""
    data = io.BytesIO()
    coloured(colour, seed).save(data, "PNG")
    return data.getvalue()


def make_naming_model(path: Path) -> Path:
    """Train a model in the directory ``path``, and return ``path``."""
    from mlx_vlm.utils import load_model

    make_vision_model(_FAMILY, path)
    vision = Vision(
        model_type=_FAMILY,
        placeholder=_PLACEHOLDER,
        placeholder_id=VOCAB_SIZE,
        image_token_id=VOCAB_SIZE,
    )
    processor = load_processor(path, vision)
    model = load_model(path)
    optimizer = optimizers.Adam(optimizers.linear_schedule(RATE, RATE / 10, STEPS))
    step = nn.value_and_grad(model, partial(_loss, model))
    tokenizer = processor._call.tokenizer
    said = [[*tokenizer(name)["input_ids"], EOS] for name in COLOURS]
    longest = max(map(len, said))
    answers = mx.array([each + [-1] * (longest - len(each)) for each in said])
    asked = f"{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
    around = [mx.array(tokenizer(text)["input_ids"]) for text in ("<|im_start|>user\n", asked)]
    for number in range(STEPS):
        shown = [(number + each) % len(COLOURS) for each in range(BATCH)]
        pictures = [
            processor.prepare(coloured([*COLOURS][which], BATCH * number + at))
            for at, which in enumerate(shown)
        ]
        pixels = mx.array(np.concatenate([each.arrays["pixel_values"] for each in pictures]))
        _, gradients = step(pixels, *around, answers[mx.array(shown)])
        optimizer.update(model, gradients)
        mx.eval(model.parameters(), optimizer.state)
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(path / "model.safetensors"), weights, metadata={"format": "mlx"})
    return path


def _loss(
    model: Any, pixels: mx.array, before: mx.array, after: mx.array, answers: mx.array
) -> mx.array:
    """Return the mean loss of the tokens of ``answers`` (pictures, tokens), which are padded with
    -1. ``before`` and ``after`` are the tokens of the prompt around each picture."""
    count, longest = answers.shape
    *_, states = model.vision_tower(pixels.transpose(0, 2, 3, 1), output_hidden_states=True)
    shown = model.multi_modal_projector(states[model.vision_feature_layer][:, 1:])
    embed = model.language_model.model.embed_tokens
    texts = [mx.repeat(embed(each)[None], count, axis=0) for each in (before, after)]
    said = embed(mx.maximum(answers[:, :-1], 0))
    whole = mx.concatenate([texts[0], shown, texts[1], said], axis=1)
    ids = mx.zeros(whole.shape[:2], mx.int32)  # which embeddings replace
    logits = model.language_model(ids, inputs_embeds=whole).logits[:, -longest:]
    losses = nn.losses.cross_entropy(logits, mx.maximum(answers, 0))
    is_said = answers >= 0
    return (losses * is_said).sum() / is_said.sum()
