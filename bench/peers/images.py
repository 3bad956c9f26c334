"""Requests with images beside mlx-vlm's own server, on the same weights.

The model is a small random one of Qwen2.5-VL's class: an image of 224 by 224 pixels is 64 tokens.
Its text is noise, which both servers find the same. mlx-vlm's server is started with
``BENCH_MLX_VLM_PYTHON``, a Python that has mlx-vlm with what it asks for.
"""

from __future__ import annotations

import asyncio
import base64
import importlib
import io
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from PIL import Image
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from bench.client import checked, token_rate
from bench.servers import mlx_vlm_server, ours
from services.measuring.answers import StreamedAnswer
from services.measuring.client import ApiClient
from shared.imports.bare_package import leave_out_code_of

MLX_VLM_VARIABLE = "BENCH_MLX_VLM_PYTHON"
CLIENTS = (1, 4, 8)
WORDS, ASKED_WORDS, TOKENS, SIDE = 2000, 16, 32, 224
SPECIAL = ("[PAD]", "[BOS]", "[EOS]")
OF_IMAGES = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
TEXT: dict[str, Any] = {
    "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 4, "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0, "max_position_embeddings": 4096, "tie_word_embeddings": False,
    "rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]},
}  # fmt: skip
TOWER: dict[str, Any] = {
    "depth": 6, "hidden_size": 384, "intermediate_size": 1536, "out_hidden_size": 512,
    "num_heads": 6, "patch_size": 14, "spatial_patch_size": 14, "spatial_merge_size": 2,
    "temporal_patch_size": 2, "in_channels": 3, "window_size": 112,
    "fullatt_block_indexes": [2, 5],
}  # fmt: skip
TEMPLATE = (
    "{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %} {% endfor %}{% endif %}{% endfor %}"
)
_numbers = count()


def images(model: str, runs: int) -> None:
    """Print first tokens and tokens per second of 1, 4 and 8 clients, each with its own image,
    and first tokens when the same images are sent again."""
    python = os.environ.get(MLX_VLM_VARIABLE)
    if not python:
        sys.exit(f"{MLX_VLM_VARIABLE} has to be a Python that has mlx-vlm with its server")
    with tempfile.TemporaryDirectory(prefix="bench-") as private:
        folder = make_model(Path(private) / "model")
        with ours(str(folder)) as mine, mlx_vlm_server(python, "--model", str(folder)) as theirs:
            ports = {"ours": mine, "mlx-vlm": theirs}
            for port in ports.values():  # decoder processes start on demand
                _ask_all(port, folder, max(CLIENTS))
            print(f"median of {runs} runs in turn; {TOKENS} tokens each")
            print("clients               first token   again   tokens/s")
            for clients in CLIENTS:
                _compare(ports, folder, clients, runs)


def _compare(ports: dict[str, int], folder: Path, clients: int, runs: int) -> None:
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in ports}
    same = asked = 0
    for run in range(runs):
        number = next(_numbers)  # the same images for both
        texts = []
        for name in [*ports][:: 1 if run % 2 else -1]:
            streams, again = _ask_all(ports[name], folder, clients, number)
            first_s, again_s = (
                statistics.median(s.first_s for s in each) for each in (streams, again)
            )
            found[name].append((first_s, again_s, token_rate(streams)))
            texts.append([stream.text for stream in streams])
        same += sum(a == b for a, b in zip(*texts, strict=True))
        asked += clients
    medians = {}
    for name, rows in found.items():
        medians[name] = [statistics.median(column) for column in zip(*rows, strict=True)]
        first, again_s, rate = medians[name]
        print(f"{clients:7}  {name:8}   {first:9.2f} s   {again_s:5.2f} s   {rate:8.1f}")
    mine, theirs = medians.values()
    ratios = [theirs[0] / mine[0], theirs[1] / mine[1], mine[2] / theirs[2]]
    print(f"         times better  {ratios[0]:7.2f}   {ratios[1]:7.2f}   {ratios[2]:8.2f}", end="")
    print(f"   ({same} of {asked} texts the same)", flush=True)


def _ask_all(
    port: int, folder: Path, clients: int, number: int = 0
) -> tuple[Sequence[StreamedAnswer], Sequence[StreamedAnswer]]:
    """Let ``clients`` clients each ask about an image at the same time, and then again."""
    asks = [_messages(1000 * number + 100 * clients + each) for each in range(clients)]
    first, again = (checked(asyncio.run(_streams(port, folder, asks))) for _ in range(2))
    return first, again


async def _streams(
    port: int, folder: Path, asks: list[list[dict[str, Any]]]
) -> list[StreamedAnswer]:
    async def ask(messages: list[dict[str, Any]]) -> StreamedAnswer:
        body = {"model": str(folder), "messages": messages, "max_tokens": TOKENS, "temperature": 0}
        with closing(ApiClient(f"http://127.0.0.1:{port}/v1")) as client:
            return await client.stream("/chat/completions", body)

    return await asyncio.gather(*map(ask, asks))


def _messages(seed: int) -> list[dict[str, Any]]:
    """Return a question about an image of noise."""
    draw = np.random.default_rng(seed)
    pixels = draw.integers(0, 256, (SIDE, SIDE, 3), np.uint8)
    data = io.BytesIO()
    Image.fromarray(pixels).save(data, "PNG")
    url = "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()
    words = " ".join(f"w{word}" for word in draw.integers(0, WORDS - 10, ASKED_WORDS))
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": words}]
    return [{"role": "user", "content": content}]


def make_model(path: Path) -> Path:
    """Write the random model into ``path``, and return ``path``."""
    leave_out_code_of("mlx_vlm")
    package = importlib.import_module("mlx_vlm.models.qwen2_5_vl")
    path.mkdir()
    first = WORDS - len(OF_IMAGES)
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    config = {
        **TEXT, "model_type": "qwen2_5_vl", "vision_config": TOWER, "vocab_size": WORDS,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        **{name: first + number for number, name in enumerate(names)},
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    made = package.ModelConfig.from_dict(dict(config))
    made.text_config = package.TextConfig.from_dict(config)
    made.vision_config = package.VisionConfig.from_dict(TOWER)
    mx.random.seed(0)
    weights = dict(tree_flatten(package.Model(made).parameters()))
    mx.save_safetensors(str(path / "model.safetensors"), weights, metadata={"format": "mlx"})
    known = [*SPECIAL, *(f"w{word}" for word in range(first - len(SPECIAL)))]
    words = Tokenizer(models.WordLevel({name: i for i, name in enumerate(known)}, "[PAD]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.add_special_tokens([AddedToken(name, special=True) for name in (*SPECIAL, *OF_IMAGES)])
    words.save(str(path / "tokenizer.json"))
    tokens = dict(zip(("pad_token", "bos_token", "eos_token"), SPECIAL, strict=True))
    files = {
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE, **tokens,
        },
        "processor_config.json": {},
        "preprocessor_config.json": {
            "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 14, "merge_size": 2,
            "temporal_patch_size": 2, "min_pixels": 28 * 28, "max_pixels": SIDE * SIDE,
        },
    }  # fmt: skip
    for name, content in files.items():
        (path / name).write_text(json.dumps(content))
    return path
